"""Records what engine and trainer really do, to compare with what an adapter reports; and plants errors in the engine.

An adapter's own report proves nothing about it. So the kit looks where none of its code comes between: at each request, where
vLLM takes it and gives its answer, and at vLLM's own configuration; at the trainer's optimizer, where it steps; at the metrics,
where the session hands them out. And there, before any code of the adapter has seen them, log-probs, policy versions and the
outcome of the self-test are made wrong, for as long as ``PlantedErrors`` says so.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from spec_plugin.api.events import Check, SelfTestReport
from spec_plugin.engine.vllm.configuration import configuration
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.trainer.harvest import RolloutHarvest
from spec_plugin_conformance.plants import PLANTED, SELF_TEST, STATED, VERSION, PlantedErrors

#: writes one event: its name, and what it holds
Write = Callable[..., None]

_FRONT = "spec_plugin.engine.front"
#: sampling options that can change what is sampled, each with the value that does not
DISTRIBUTION: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
}
#: options of a request that change nothing of what is sampled, and nothing of how long it is
_NEUTRAL = frozenset(
    {
        "detokenize",
        "extra_args",
        "flat_logprobs",
        "logprob_token_ids",
        "logprobs",
        "output_kind",
        "prompt_logprobs",
        "skip_clone",
        "skip_reading_prefix_cache",
        "skip_special_tokens",
        "spaces_between_special_tokens",
    }
)
#: what ``TargetInfo`` and the engine both say of the engine
CONFIGURATION = ("dtype", "max_model_len", "max_num_seqs", "tensor_parallel", "device_type", "load_format")
_testing: ContextVar[bool] = ContextVar("testing", default=False)
_clock: ContextVar[Any] = ContextVar("clock", default=None)  # the front that times the request that is being made
_numbers: dict[int, int] = {}  # engines of this process, as they are seen
_configured: set[int] = set()  # those whose configuration is written
_harvests: WeakKeyDictionary[SpecSession, Write] = WeakKeyDictionary()
_watched: list[PlantedErrors] = []  # of this process's engines, once they are


def watch_metrics(session: SpecSession, write: Write) -> None:
    """Record the metrics that the session hands the adapter for the trainer's log."""
    merged = session.metrics

    def metrics() -> dict[str, float]:
        values = merged()
        write("handed_metrics", values=values)
        return values

    session.metrics = metrics  # type: ignore[method-assign]


def watch_harvests(session: SpecSession, write: Write) -> None:
    """Record each call of ``RolloutHarvest.open`` in this session."""
    if not hasattr(RolloutHarvest.open, "__wrapped__"):  # once, though the sessions before may be gone
        opened = RolloutHarvest.open

        @functools.wraps(opened)
        def new_budget(self: RolloutHarvest) -> None:
            if (note := _harvests.get(self.session)) is not None:
                note("harvest_opened")
            opened(self)

        RolloutHarvest.open = new_budget  # type: ignore[method-assign]
    _harvests[session] = write


def watch_updates(write: Write, ours: Callable[[], bool]) -> None:
    """Record each optimizer step in this process, but for the draft's, during which ``ours()`` is true."""

    def stepping(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not ours():
            write("policy_update", optimizer=type(optimizer).__name__)

    register_optimizer_step_pre_hook(stepping)


def watch_engine(plants: PlantedErrors, write: Write) -> None:
    """Record requests and configuration of this process's engines; does nothing where ``EngineFront`` is not loaded."""
    if _watched or _FRONT not in sys.modules:
        return
    _watched.append(plants)
    front: Any = sys.modules[_FRONT].EngineFront
    front.engine_arguments = _wrap_engine_arguments(front.engine_arguments, plants, write)
    front.self_test = _wrap_self_test(front.self_test, plants)
    front.state = _wrap_state(front.state, write)
    front.request = _wrap_request(front.request)
    front.set_schedule = _wrap_set_schedule(front.set_schedule, write)
    front.start_phase = _wrap_start_phase(front.start_phase, write)


def watch_requests(plants: PlantedErrors, write: Write, shown: Mapping[str, Any]) -> None:
    """Record each request, and the configuration of each engine, of this process's engines that are still to be made.

    Args:
        plants: errors that their answers get.
        write: takes the events.
        shown: options of the engine as the plugin was shown them; it may be filled later.
    """
    from vllm import LLM
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    engine: Any = AsyncLLM
    engine.generate = _wrap_generate(engine.generate, plants, write, shown)
    batches: Any = LLM
    batches.generate = _wrap_batch(batches.generate, plants, write)
    synchronous: Any = LLMEngine
    synchronous.add_request = _wrap_add_request(synchronous.add_request, write, shown)


def _number(engine: Any) -> int:
    """Of an engine of this process, by its configuration, which all that stands before one engine shares."""
    return _numbers.setdefault(id(getattr(engine, "vllm_config", engine)), len(_numbers))


def _clock_of(engine: Any) -> str:
    front = _clock.get()
    return "none" if front is None else "own" if _number(front.engine) == _number(engine) else "another"


def _wrap_engine_arguments(original: Any, plants: PlantedErrors, write: Write) -> Any:
    shown: dict[str, Any] = {}

    @functools.wraps(original)
    def engine_arguments(self: Any, given: Mapping[str, Any], extension: str) -> dict[str, Any]:
        arguments: dict[str, Any] = original(self, given, extension)
        if not shown:  # the first engine of this process is about to be made
            watch_requests(plants, write, shown)
            if plants.place_of_version:
                delay_version(plants.place_of_version, plants)
        shown.update({"extension": extension}, **given)
        return arguments

    return engine_arguments


def _wrap_generate(original: Any, plants: PlantedErrors, write: Write, shown: Mapping[str, Any]) -> Any:
    @functools.wraps(original)
    async def generate(
        self: Any, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncIterator[Any]:
        testing, answer, began = _testing.get(), CollectedOutput(sampling_params), time.time()
        _begins(self, write, shown)
        try:
            async with contextlib.aclosing(original(self, prompt, sampling_params, request_id, **kwargs)) as outputs:
                async for output in outputs:
                    if not testing:
                        _plant(output, plants)
                    answer.add(output)
                    yield output
        finally:
            said = {} if testing else {"sequences": answer.sequences}
            write("engine_request", test=testing, began=began, engine=_number(self), **said, **answer.summary())

    return generate


def _begins(engine: Any, write: Write, shown: Mapping[str, Any]) -> None:
    """An engine gets a request, its first one perhaps."""
    number = _number(engine)
    if number not in _configured:
        _configured.add(number)
        config = engine.vllm_config
        write("engine_configured", **configuration(config), **_seen_options(config, shown), options=options_of(config))
    write("engine_request_begins", test=_testing.get(), clock=_clock_of(engine), engine=number)


def _plant(output: Any, plants: PlantedErrors) -> None:
    for what, stated in STATED.items():
        if plants.planted(what):
            perturb(output, stated)


def _wrap_add_request(original: Any, write: Write, shown: Mapping[str, Any]) -> Any:
    """Each request of a synchronous engine, whoever steps it."""

    @functools.wraps(original)
    def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        _begins(self, write, shown)
        return original(self, *args, **kwargs)

    return add_request


def _wrap_batch(original: Any, plants: PlantedErrors, write: Write) -> Any:
    """What a synchronous ``LLM`` answers to a batch of the trainer's requests, which begin and end together."""

    @functools.wraps(original)
    def generate(self: Any, prompts: Any, sampling_params: Any = None, *args: Any, **kwargs: Any) -> Any:
        began = time.time()
        outputs = original(self, prompts, sampling_params, *args, **kwargs)
        params = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params] * len(outputs)
        for one, output in zip(params, outputs, strict=True):
            _plant(output, plants)
            answer = CollectedOutput(one)
            answer.add(output)
            said = {"sequences": answer.sequences, **answer.summary()}
            write("engine_request", test=False, began=began, engine=_number(self.llm_engine), **said)
        return outputs

    return generate


class CollectedOutput:
    """The log-probs of one request, collected from vLLM's ``RequestOutput``s, cumulative or in deltas."""

    def __init__(self, sampling_params: Any) -> None:
        self._params = sampling_params
        self._parts = sampling_params.output_kind.name == "DELTA"
        self._found: dict[int, list[float | None]] = {}
        self._tokens: dict[int, list[int]] = {}
        self._asked: list[int] = []
        self._accepted: dict[int, list[int]] = {}  # verification steps, and drafted tokens accepted in them

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self._asked)

    @property
    def sequences(self) -> list[list[int]]:
        """Token ids of prompt and response, sample by sample."""
        return [self._asked + self._tokens[index] for index in sorted(self._tokens)]

    def add(self, output: Any) -> None:
        """Take up the next ``RequestOutput``."""
        self._asked = list(output.prompt_token_ids or ())
        for sample in output.outputs:
            self._tokens[sample.index] = [
                *(self._tokens.get(sample.index, []) if self._parts else []),
                *map(int, sample.token_ids),
            ]
            before = self._found.get(sample.index, []) if self._parts else []
            values = zip(sample.logprobs, sample.token_ids, strict=False) if sample.logprobs else ()
            found: list[float | None] = [at[token].logprob for at, token in values]
            if (said := getattr(sample, "spec_decode_metrics", None)) is not None:  # where the engine was asked for it
                self._accepted[sample.index] = [sum(said.histogram), sum(n * of for n, of in enumerate(said.histogram))]
            self._found[sample.index] = [*before, *found, *[None] * (len(sample.token_ids) - len(found))]

    @property
    def log_probs(self) -> list[float | None]:
        """One for each sampled token, sample by sample; None where none was requested."""
        return [value for index in sorted(self._found) for value in self._found[index]]

    def summary(self) -> dict[str, Any]:
        """What was asked, and what was answered."""
        params, log_probs = self._params, self.log_probs
        return {
            "sampling": sampling_of(params),
            "asked": asked_of(params),
            "prompt": self.prompt,
            "log_probs": log_probs,
            "plain": undrafted(params.extra_args, len(log_probs)),
            "accepted": [self._accepted[index] for index in sorted(self._accepted)],
        }


def undrafted(extra_args: Mapping[str, Any] | None, tokens: int) -> int:
    """How many of a response's tokens the engine was asked to sample without drafts, in a phase that drafts."""
    off = (extra_args or {}).get("spec_off")
    if isinstance(off, list):
        first, until = map(int, off)
        return max(0, min(tokens, until) - first)
    return tokens if off else 0


def perturb(output: Any, stated: float) -> None:
    """Set the log-prob of each response's first token, in place, in a ``RequestOutput``."""
    for sample in output.outputs:
        said = sample.logprobs
        if said and sample.token_ids:
            if hasattr(said, "start_indices"):  # vLLM's FlatLogprobs, which makes an object of a place for whoever asks
                said.logprobs[said.start_indices[0]] = stated
            else:
                said[0][sample.token_ids[0]].logprob = stated


def sampling_of(options: Any) -> dict[str, Any]:
    """The sampling options that change what is sampled.

    Args:
        options: vLLM's ``SamplingParams``, or a mapping as in ``TargetInfo.sampling``.
    """
    given = options if isinstance(options, Mapping) else {name: getattr(options, name) for name in DISTRIBUTION}
    found = {name: given.get(name, idle) for name, idle in DISTRIBUTION.items()}
    found["top_k"] = max(0, found["top_k"] or 0)  # -1 limits nothing, either
    return {name: v for name, v in found.items() if v != DISTRIBUTION[name] and v not in (None, [], {})}


def asked_of(sampling_params: Any) -> dict[str, Any]:
    """The options of a request that differ from vLLM's defaults, but for those that do not change the text."""
    usual = type(sampling_params)()
    names = (name for name in sampling_params.__struct_fields__ if not name.startswith("_"))
    rest = [name for name in names if name not in _NEUTRAL and name not in DISTRIBUTION]
    found = {name: (getattr(sampling_params, name), getattr(usual, name)) for name in rest}
    other = {name: _for_json(value) for name, (value, default) in found.items() if (value or 0) != (default or 0)}
    return sampling_of(sampling_params) | other


def _for_json(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else str(value)


def _seen_options(vllm_config: Any, shown: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the allow-list judges: as the engine ``has`` them, and as they were ``shown`` to it."""
    from vllm import AsyncEngineArgs

    has = {
        "logprobs_mode": vllm_config.model_config.logprobs_mode,
        "logits_processors": vllm_config.model_config.logits_processors,
        "pipeline_parallel_size": vllm_config.parallel_config.pipeline_parallel_size,
    }
    fields = AsyncEngineArgs.__dataclass_fields__
    was = {n: shown[n] if shown.get(n) is not None else fields[n].default for n in has}
    return {"has": {n: _plain(v) for n, v in has.items()}, "shown": {n: _plain(v) for n, v in was.items()}}


def options_of(vllm_config: Any) -> dict[str, str]:
    """Every option of an engine that is a number, a word or a list of such, by ``<part>.<name>``."""
    found: dict[str, str] = {}
    for part in fields(vllm_config) if is_dataclass(vllm_config) else ():
        options = getattr(vllm_config, part.name)
        named = ((o.name, getattr(options, o.name, None)) for o in fields(options)) if is_dataclass(options) else ()
        found |= {f"{part.name.removesuffix('_config')}.{name}": str(value) for name, value in named if _simple(value)}
    return found


def _simple(value: Any) -> bool:
    if isinstance(value, list | tuple | set):
        return all(map(_simple, value))
    return value is None or isinstance(value, bool | int | float | str | Enum | torch.dtype)


def _plain(value: Any) -> str | None:
    """As text for JSON; None for None and for an empty list."""
    return None if value is None or value == [] else str(getattr(value, "value", value))


def _wrap_self_test(original: Any, plants: PlantedErrors) -> Any:
    @functools.wraps(original)
    async def self_test(self: Any, *args: Any, **kwargs: Any) -> SelfTestReport:
        if plants.planted(SELF_TEST):
            return SelfTestReport((Check("samples", False, PLANTED),), 0.0)
        token = _testing.set(True)
        try:
            report: SelfTestReport = await original(self, *args, **kwargs)
        finally:
            _testing.reset(token)
        return report

    return self_test


def _wrap_state(original: Any, write: Write) -> Any:
    @functools.wraps(original)
    async def state(self: Any, moment: str) -> Any:
        found = await original(self, moment)
        write("engine_state", engine=_number(self.engine), **asdict(found))
        config = getattr(self.engine, "vllm_config", None)
        if moment == "rollout" and config is not None and config.parallel_config.tensor_parallel_size == 1:
            rows = (await self.engine.collective_rpc("spec_rows"))[0]
            write("engine_rows", engine=_number(self.engine), policy_version=found.policy_version, rows=rows)
        return found

    return state


def _wrap_request(original: Any) -> Any:
    @functools.wraps(original)
    @contextlib.contextmanager
    def request(self: Any) -> Iterator[Any]:
        with original(self) as counted:
            token = _clock.set(self)
            try:
                yield counted
            finally:
                with contextlib.suppress(ValueError):  # it ends in another task than it began in
                    _clock.reset(token)

    return request


def _wrap_set_schedule(original: Any, write: Write) -> Any:
    @functools.wraps(original)
    async def set_schedule(self: Any, schedule: Any) -> Any:
        found = await original(self, schedule)
        write("engine_schedule", engine=_number(self.engine), table=list(found.confirmed.table))
        return found

    return set_schedule


def _wrap_start_phase(original: Any, write: Write) -> Any:
    @functools.wraps(original)
    def start_phase(self: Any, policy_version: int) -> None:
        original(self, policy_version)
        write("engine_phase", engine=_number(self.engine), policy_version=policy_version)

    return start_phase


def delay_version(place: str, plants: PlantedErrors) -> None:
    """Make the policy version that an engine keeps read as one less, while ``VERSION`` is planted.

    Args:
        place: ``module:Class.attribute``.
        plants: of the run.
    """
    module, _, path = place.partition(":")
    name, _, attribute = path.partition(".")
    owner = getattr(importlib.import_module(module), name)
    default = getattr(owner, attribute, None)

    def get(self: Any) -> Any:
        version = vars(self).get(attribute, default)
        return version - 1 if version and plants.planted(VERSION) else version

    def set_to(self: Any, version: Any) -> None:
        vars(self)[attribute] = version

    setattr(owner, attribute, property(get, set_to))
