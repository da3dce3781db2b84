"""Puts the adapter around TRL's own methods, once their modules are imported; the adapter's one patch module.

=================================================================== ====================================================
symbol                                                              reason
=================================================================== ====================================================
``GRPOTrainer`` and ``RLOOTrainer``: ``__init__``                    what cannot be done is refused before a model is read
``… _generate_and_score_completions``, ``compute_loss``,             the rollout phase, harvest, log-prob check
``… _get_per_token_logps_and_entropies``
``GRPOTrainer._tool_call_loop``                                     which tokens of a completion are a tool's
``… _load_optimizer_and_scheduler``                                 the draft of a checkpoint; nothing else is told its path
``trl.generation.vllm_generation.LLM``                              TRL has no setting for the engine's arguments
``VLLMGeneration.__init__``, ``sync_weights``, ``generate``         which trainer's engine it is; refresh, self-test, k
``__init__`` of trainers with an engine that have no adapter        refused by name: the flag would have no effect
=================================================================== ====================================================

An attribute that users set is replaced, too: ``trainer.rollout_func``, by one that calls it. The rest are callbacks that
``transformers`` has for everybody. Checked on TRL 1.8 to 1.16 (``tools/trl_symbols.py``); what is gone raises ``PatchError``.
Nothing is wrapped without the flag.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any, NamedTuple

import wrapt

from spec_plugin_trl.flag import LEAVE_OUT

ENGINE = "trl.generation.vllm_generation"
TRAINERS: Mapping[str, str] = {"trl.trainer.grpo_trainer": "GRPOTrainer", "trl.trainer.rloo_trainer": "RLOOTrainer"}
#: what is wrapped: the class of each module
WRAPPED: Mapping[str, str] = {ENGINE: "VLLMGeneration", **TRAINERS}
#: trainers that may have an engine of vLLM's, and no adapter
OTHERS: Mapping[str, str] = {
    "trl.experimental.async_distillation.async_distillation_trainer": "AsyncDistillationTrainer",
    "trl.experimental.async_grpo.async_grpo_trainer": "AsyncGRPOTrainer",
    "trl.experimental.gold.gold_trainer": "GOLDTrainer",
    "trl.experimental.iw_opd.iw_opd_trainer": "IWOPDTrainer",
    "trl.experimental.online_dpo.online_dpo_trainer": "OnlineDPOTrainer",
    "trl.experimental.sdft.sdft_trainer": "SDFTTrainer",
    "trl.experimental.sdpo.sdpo_trainer": "SDPOTrainer",
    "trl.experimental.server_distillation.server_distillation_trainer": "ServerDistillationTrainer",
    "trl.trainer.distillation_trainer": "DistillationTrainer",
}


class Called(NamedTuple):
    """How we call a method of TRL's: arguments by position, ``self`` among them, and by name; of none, as TRL itself does."""

    positional: tuple[str, ...] = ()
    named: tuple[str, ...] = ()


_OF_BOTH: Mapping[str, Called] = {
    "_generate_and_score_completions": Called(("self", "inputs")),
    "_get_per_token_logps_and_entropies": Called(
        ("self", "model", "input_ids", "attention_mask", "logits_to_keep"), ("batch_size",)
    ),
    "compute_loss": Called(("self", "model", "inputs"), ("return_outputs", "num_items_in_batch")),
    "_load_optimizer_and_scheduler": Called(("self", "checkpoint")),
}
#: methods of each class that is wrapped, by way of the adapter's method of that name
METHODS: Mapping[str, Mapping[str, Called]] = {
    "VLLMGeneration": {
        "sync_weights": Called(("self",)),
        "generate": Called(("self", "prompts"), ("images", "num_generations")),
    },
    "GRPOTrainer": {**_OF_BOTH, "_tool_call_loop": Called()},
    "RLOOTrainer": _OF_BOTH,
}
_BASE = "trl.trainer.base_trainer"  # of all trainers
_trainer: ContextVar[Any] = ContextVar("trainer", default=None)  # that is being made
_generation: ContextVar[Any] = ContextVar("generation", default=None)
_other: ContextVar[Any] = ContextVar("other", default=None)  # one that has no adapter
_made: list[str] = []  # trainers that speculate, or were refused
_ADVICE = f"use trl >=1.8,<=1.16 with vLLM installed, or report this; or {LEAVE_OUT}"


@functools.cache
def register() -> None:
    """Wrap what is imported already, and what will be; once."""
    wrapt.register_post_import_hook(_engine, ENGINE)
    for module in TRAINERS:
        wrapt.register_post_import_hook(_trainer_module, module)
    for module in OTHERS:
        wrapt.register_post_import_hook(_other_module, module)
    if _BASE not in sys.modules:  # else this process is a fork of one that imported it for others
        wrapt.register_post_import_hook(lambda _module: atexit.register(_say_if_in_vain), _BASE)


def keep_quiet() -> None:
    """For a process that only looks at TRL: that it makes no trainer is not said at its end."""
    _made.append("none is meant to be made")


def _say_if_in_vain() -> None:
    if not _made and os.environ.get("RANK", "0") == "0":
        print(
            "spec-plugin: it is enabled and had no effect in this process, which made no GRPOTrainer or RLOOTrainer of TRL",
            file=sys.stderr,
        )


def _gone(message: str) -> Exception:
    from spec_plugin.adapter import PatchError

    return PatchError(message)


def look(owner: Any, methods: Mapping[str, Called]) -> None:
    """Are the methods there, and can they be called as we call them.

    Raises:
        PatchError: naming the first that is not.
    """
    for name, parameters in methods.items():
        found = getattr(owner, name, None)
        if found is None:
            raise _gone(f"trl's {owner.__name__}.{name} is gone: {_ADVICE}")
        if not parameters.positional:
            continue
        try:
            inspect.signature(found).bind(*parameters.positional, **dict.fromkeys(parameters.named))
        except TypeError as error:
            raise _gone(f"trl's {owner.__name__}.{name} takes other arguments ({error}): {_ADVICE}") from error


def look_at(module: ModuleType) -> Any:
    """Is all there of a module that we wrap.

    Args:
        module: one of ``WRAPPED``.

    Returns:
        Its class.

    Raises:
        PatchError: naming the first thing that is not.
    """
    name = WRAPPED[module.__name__]
    if (owner := getattr(module, name, None)) is None:
        raise _gone(f"{module.__name__} has no {name} any more: {_ADVICE}")
    look(owner, METHODS[name])
    if module.__name__ == ENGINE and not hasattr(module, "LLM"):
        raise _gone(f"{ENGINE} has no LLM any more: {_ADVICE}")
    return owner


def _trainer_module(module: ModuleType) -> None:
    owner = look_at(module)
    owner.__init__ = _known_while_made(_trainer, owner.__init__, before_trainer)
    _wrap_methods(owner)


def _wrap_methods(owner: Any) -> None:
    for name in METHODS[owner.__name__]:
        setattr(owner, name, _through(getattr(owner, name), name.lstrip("_")))


def before_trainer(trainer: Any, given: Mapping[str, Any]) -> None:
    """Refuse what cannot be done, as the first thing of a trainer's ``__init__``; a dry run puts its own in the place of this."""
    from spec_plugin_trl import options

    _made.append(type(trainer).__name__)
    options.refuse_before(type(trainer), given)


def _known_while_made(
    of: ContextVar[Any], original: Callable[..., Any], before: Callable[[Any, Mapping[str, Any]], None] | None = None
) -> Callable[..., Any]:
    """The same ``__init__``; while it runs, ``of`` has the object. ``before`` is called with it and its arguments first."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if before is not None:
            before(self, inspect.signature(original).bind(self, *args, **kwargs).arguments)
        token = of.set(self)
        try:
            original(self, *args, **kwargs)
        finally:
            of.reset(token)

    return __init__


def _through(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same; of an object that has an adapter, by way of the adapter's method of that name."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        spec, call = self.__dict__.get("_spec"), functools.partial(original, self)
        return call(*args, **kwargs) if spec is None else getattr(spec, name)(call, *args, **kwargs)

    return method


def _engine(module: ModuleType) -> None:
    owner = look_at(module)
    owner.__init__ = _known_while_made(_generation, owner.__init__)
    _wrap_methods(owner)
    module.LLM = functools.partial(_llm, module.LLM)  # type: ignore[attr-defined]


def _llm(original: Callable[..., Any], **kwargs: Any) -> Any:
    """The engine of a trainer that is being made, with a draft."""
    trainer, generation = _trainer.get(), _generation.get()
    if trainer is None or generation is None:
        raise _gone(
            f"{sys._getframe(1).f_globals.get('__name__')} makes an engine for a trainer that is none of "
            f"{', '.join(TRAINERS.values())}: {LEAVE_OUT}"
        )
    from spec_plugin_trl.trainer import TrlRun

    return TrlRun.build(trainer, generation, original, kwargs)


def _other_module(module: ModuleType) -> None:
    owner = getattr(module, OTHERS[module.__name__], None)
    if owner is not None:
        owner.__init__ = _known_while_made(_other, owner.__init__, before_other)


def before_other(trainer: Any, given: Mapping[str, Any]) -> None:
    """The same of a trainer that has no adapter."""
    from spec_plugin.adapter import refuse
    from spec_plugin_trl import options

    try:
        refuse(options.of_other(type(trainer), given), LEAVE_OUT)
    except Exception:
        _made.append(type(trainer).__name__)
        raise
