"""verl's configuration, read once at the edge: SpecConfig, what is known of the target, and every objection.

Each function takes verl's dataclasses, as the run has them, as well as the ``DictConfig`` they are made of, as the check
has it. Both have attributes; what is in the dataclass alone is read with its default there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from spec_plugin.adapter import (
    NAME,
    Objection,
    SpecConfig,
    SpecConfigError,
    TargetInfo,
    meant_for_us,
    unsupported,
)
from spec_plugin_verl_check import actors

PREFIX = "+actor_rollout_ref.rollout.custom.spec."
FLAG = "actor_rollout_ref.model.external_lib=spec_plugin_verl"
#: the same in every process, for mains that start engines before they look at the model's options
EVERYWHERE = "++ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=spec_plugin_verl"
LEAVE_OUT = f"leave out {FLAG}"
BOTH_PLACES = "rollouts both beside the actors and apart from them"
STRATEGIES = tuple(actors.ACTORS)
#: of verl's trainer; the last one with engines in processes of their own
MODES = ("sync", "colocate_async", "separate_async")
APART = MODES[-1]
DEVICES = ("cpu", "cuda")
_ROLLOUT, _MODEL = "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
_DTYPES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
NO_SIZE = "a size that is none"
#: what we set in the engine ourselves
_OURS = ("speculative_config", "scheduler_cls", "worker_extension_cls")
#: of the rollout's options: what it may be, what anything else would be, what to do
_ENGINE = (
    ("name", "vllm", "rollouts by {value}", "set it to vllm"),
    ("pipeline_model_parallel_size", 1, "pipeline parallel engines", "set it to 1"),
    ("data_parallel_size", 1, "engine data parallel", "set it to 1: verl then starts more replicas"),
    ("disaggregation.enabled", False, "prefill-decode disaggregation", "set it to False"),
    ("qat.enable", False, "quantized rollouts", "set actor_rollout_ref.actor.fsdp_config.qat.enable=False"),
    ("quantization", None, "quantized rollouts", "set it to null"),
)


def as_builtin(value: Any) -> Any:
    """Dicts and lists instead of OmegaConf's."""
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value


def _value(section: Any, path: str) -> Any:
    """An option of one of verl's dataclasses, or of the configuration that it is made of; None where it is not there."""
    for name in path.split("."):
        section = section.get(name) if isinstance(section, Mapping) else getattr(section, name, None)
    return section


def read_config(rollout: Any) -> SpecConfig:
    """SpecConfig from ``rollout.custom.spec``; all defaults when there is none.

    Args:
        rollout: verl's RolloutConfig.

    Raises:
        SpecConfigError: naming the option as the user writes it on verl's command line.
    """
    custom = as_builtin(getattr(rollout, "custom", None)) or {}
    raw = as_builtin(custom.get(NAME)) if isinstance(custom, Mapping) else custom
    if raw is not None and not isinstance(raw, Mapping):
        raise SpecConfigError(f"{PREFIX}*: expected options such as {PREFIX}k=3, got {raw!r}")
    if isinstance(custom, Mapping) and (lost := list(misplaced(custom, f"{_ROLLOUT}custom"))):
        raise SpecConfigError("; ".join(map(str, lost)))
    return SpecConfig.parse(raw, PREFIX)


def misplaced(tree: Any, path: str = "") -> Iterator[Objection]:
    """Options that are most likely ours, under a name or in a place where nobody reads them.

    Args:
        tree: a part of verl's configuration, as plain dicts.
        path: where it is in the whole.
    """
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        place = f"{path}.{name}" if path else str(name)
        if f"+{place}." == PREFIX:
            continue
        if not meant_for_us(str(name), value):
            yield from misplaced(value, place)
            continue
        option = next(iter(value))
        yield Objection(
            f"+{place}.{option}",
            str(value[option]),
            "a misspelt option",
            "neither verl nor spec-plugin reads this",
            f"write it as {PREFIX}{option}",
        )


def engine_kwargs(rollout: Any) -> dict[str, Any]:
    """What the user hands to vLLM past verl's options; verl drops what is None."""
    given = (as_builtin(getattr(rollout, "engine_kwargs", None)) or {}).get("vllm") or {}
    return {name: value for name, value in given.items() if value is not None}


def engine_arguments(rollout: Any) -> dict[str, Any]:
    """The engine's arguments that matter here, merged as verl merges them: ``engine_kwargs`` win over verl's own options."""
    return {
        "dtype": rollout.dtype,
        "max_model_len": rollout.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "logprobs_mode": rollout.logprobs_mode,
        "quantization": rollout.quantization,
        "enforce_eager": rollout.enforce_eager,
        **engine_kwargs(rollout),
    }


def graph_mode(rollout: Any) -> str:
    """vLLM's ``cudagraph_mode``, which verl sets where the user does not."""
    config = engine_kwargs(rollout).get("compilation_config") or {}
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError:
            return f"unknown (compilation_config={config!r} is no JSON)"
    if not isinstance(config, Mapping):  # a level, which chooses the mode as well
        return f"vLLM's choice for compilation_config={config!r}"
    return str(config.get("cudagraph_mode") or "FULL_AND_PIECEWISE")


def _length(arguments: Mapping[str, Any], hf_config: Mapping[str, Any], model: Any) -> int | None:
    """Of the engine's texts; where nobody asks it is the model's positions, as ``override_config`` changes them, unscaled."""
    changed = as_builtin(getattr(model, "override_config", None)) or {}
    said = {**hf_config, **changed.get("model_config", changed)}
    known = (
        arguments["max_model_len"],
        *(part.get("max_position_embeddings") for part in (said, said.get("text_config") or {})),
    )
    return next((length for length in known if isinstance(length, int)), None)


def target_info(rollout: Any, path: str, hf_config: Mapping[str, Any], model: Any = None, **known: Any) -> TargetInfo:
    """What verl's configuration tells of the target and its engine.

    Args:
        rollout: verl's RolloutConfig.
        path: the target's folder, or its name on the hub.
        hf_config: its config.json.
        model: verl's HFModelConfig.
        known: further fields of TargetInfo.
    """
    arguments = engine_arguments(rollout)
    return TargetInfo(
        path=path,
        hf_config=hf_config,
        dtype=_DTYPES.get(arguments["dtype"], arguments["dtype"]),
        tensor_parallel=arguments["tensor_parallel_size"],
        max_num_seqs=arguments["max_num_seqs"],
        max_model_len=_length(arguments, hf_config, model),
        load_format=str(engine_kwargs(rollout).get("load_format", rollout.load_format)),
        sampling={
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "repetition_penalty": getattr(rollout, "repetition_penalty", 1.0),
        },
        **known,
    )


#: which the draft shares with the policy
SHARED_MODULES = ("embed_tokens", "lm_head")


def lora(model: Any) -> str | None:
    """``merged`` or ``adapter``, and None without LoRA."""
    if not any((_value(model, rank) or 0) > 0 for rank in ("lora_rank", "lora.rank")):
        return None  # whatever adapter a path names: verl loads none without a rank
    return "merged" if _value(model, "lora.merge") else "adapter"


def objections(rollout: Any, model: Any, config: Any = None, device: str = "cuda") -> Iterator[Objection]:
    """Everything in verl's configuration that stands in the way, each with what to set instead.

    Args:
        rollout: verl's RolloutConfig, or the configuration it is made of.
        model: verl's HFModelConfig, or the configuration it is made of.
        config: verl's whole configuration where it is at hand; the run's processes have only the two above.
        device: verl's device.
    """
    if wrong := list(_no_sizes(rollout, model)):
        yield from wrong
        return  # the others compare them
    yield from _engine(rollout)
    yield from _handed_to_vllm(rollout)
    if _value(model, "mtp.enable"):
        yield unsupported(f"{_MODEL}mtp.enable", True, "a second drafting method (MTP)", "set it to False")
    if lora(model) == "adapter":
        yield from _adapters(rollout, model)
    if device not in DEVICES:
        yield unsupported("trainer.device", device, f"the device {device}", f"use one of {', '.join(DEVICES)}")
    if config is not None:
        yield from _run(config)


def _no_sizes(rollout: Any, model: Any) -> Iterator[Objection]:
    """Sizes that are compared here and are none; verl passes them on to where nobody says which option it was."""
    given = engine_kwargs(rollout)
    sizes = {f"{_ROLLOUT}{name}": _value(rollout, name) for name in ("max_num_seqs", "tensor_model_parallel_size")}
    kwargs = f"{_ROLLOUT}engine_kwargs.vllm."
    sizes |= {f"{kwargs}{name}": given[name] for name in ("max_num_seqs", "tensor_parallel_size") if name in given}
    or_none = {f"{_MODEL}{name}": _value(model, name) for name in ("lora_rank", "lora.rank")}
    or_none |= {f"{_ROLLOUT}{name}": _value(rollout, name) for name in ("max_model_len", "expert_parallel_size")}
    for option, value in {**sizes, **{name: value or 1 for name, value in or_none.items()}}.items():
        if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and option in sizes):
            yield Objection(option, str(value), NO_SIZE, "this must be a whole number, 1 or more", "set one")


def _engine(rollout: Any) -> Iterator[Objection]:
    def no(option: str, value: Any, what: str, instead: str) -> Objection:
        return unsupported(f"{_ROLLOUT}{option}", value, what, instead)

    for option, allowed, what, instead in _ENGINE:
        value = _value(rollout, option)
        if value != allowed and (value is not None or allowed):
            yield no(option, value, what.format(value=value), instead)
    if (experts := _value(rollout, "expert_parallel_size") or 1) > 1:
        beyond = experts > rollout.tensor_model_parallel_size
        what = "expert parallel over data parallel engines" if beyond else "expert parallel engines"
        yield no("expert_parallel_size", experts, what, "set it to 1")
    if _value(rollout, "enable_rollout_routing_replay"):
        instead = "set it to False, and router_replay.mode to R2, which replays the actor's own"
        yield actors.rollouts_routing(f"{_ROLLOUT}enable_rollout_routing_replay", True, instead)
    backend = rollout.checkpoint_engine.backend
    if str(backend).startswith("delta"):
        yield no("checkpoint_engine.backend", backend, f"weight syncs by {backend}", "set it to naive, or nccl")
    dtype = engine_arguments(rollout)["dtype"]
    if _DTYPES.get(dtype, dtype) not in _DTYPES.values():
        what = "dtypes that are not named (draft and tolerance need one)"
        yield no("dtype", repr(dtype), what, f"set one of {', '.join(sorted(set(_DTYPES.values())))}")


def _handed_to_vllm(rollout: Any) -> Iterator[Objection]:
    given = engine_kwargs(rollout)
    where = f"{_ROLLOUT}engine_kwargs.vllm."
    for name in _OURS:
        if name in given:
            what = "engine options that spec-plugin sets"
            yield Objection(f"{where}{name}", str(given[name]), what, "spec-plugin sets it too", "remove it")
    refused = {
        "quantization": ("quantized rollouts", None),
        "data_parallel_size": ("engine data parallel", 1),
        "enable_expert_parallel": ("expert parallel engines", False),
        "tensor_parallel_size": ("an engine of another size than its replica", rollout.tensor_model_parallel_size),
    }
    for name, (what, allowed) in refused.items():
        if given.get(name, allowed) != allowed:
            yield unsupported(f"{where}{name}", given[name], what, "remove it")


def _adapters(rollout: Any, model: Any) -> Iterator[Objection]:
    """LoRA adapters in the engine."""
    if (backend := rollout.checkpoint_engine.backend) != "naive":
        where, instead = f"{_ROLLOUT}checkpoint_engine.backend", f"set {_MODEL}lora.merge=True"
        yield unsupported(where, backend, "LoRA adapters in engines apart from the actor", instead)
    trained = as_builtin(_value(model, "target_modules")) or ()
    names = (trained,) if isinstance(trained, str) else tuple(map(str, trained))
    if shared := [name for name in names if name.rpartition(".")[2] in SHARED_MODULES]:
        instead = "remove them: the draft uses the target's own"
        yield unsupported(f"{_MODEL}target_modules", shared, "LoRA adapters of the embedding or the LM head", instead)


def _run(config: Any) -> Iterator[Objection]:
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    yield from actors.objections(actor.strategy, actors.options_of(actor), lora(model) is not None)
    if not config.trainer.use_v1:
        yield unsupported("trainer.use_v1", False, "verl's legacy trainer", "set it to True")
    yield from _mode(config.trainer.v1.trainer_mode, config.actor_rollout_ref.hybrid_engine)
    for name in ("use_trainer_do_validate", "use_dynamic_resource_scheduling"):  # of fully_async
        if _value(config, f"async_training.{name}"):
            yield unsupported(f"async_training.{name}", True, BOTH_PLACES, "set it to False")


def _mode(mode: str, hybrid: bool) -> Iterator[Objection]:
    engines = "actor_rollout_ref.hybrid_engine"
    if mode not in MODES:
        instead = f"set it to {', '.join(MODES[:-1])} or {APART}"
        yield unsupported("trainer.v1.trainer_mode", mode, f"the trainer mode {mode}", instead)
    elif mode == APART and hybrid:
        instead = f"set it to False, or another trainer.v1.trainer_mode than {APART}"
        yield unsupported(engines, True, BOTH_PLACES, instead)
    elif mode != APART and not hybrid:
        instead = f"set it to True, or trainer.v1.trainer_mode={APART}"
        yield unsupported(engines, False, "rollouts outside of the actors' processes", instead)
