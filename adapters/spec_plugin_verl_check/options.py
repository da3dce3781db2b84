"""verl's configuration, read once at the edge: SpecConfig, what is known of the target, and every objection.

Each function takes verl's dataclasses, as the run has them, as well as the ``DictConfig`` they are made of, as the check
has it. Both have attributes; what is in the dataclass alone is read with its default there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from spec_plugin.adapter import (
    NAME,
    Objection,
    SpecConfig,
    SpecConfigError,
    TargetInfo,
    is_on,
    meant_for_us,
    unsupported,
)

PREFIX = "+actor_rollout_ref.rollout.custom.spec."
FLAG = "actor_rollout_ref.model.external_lib=spec_plugin_verl"
#: the same in every process, for mains that start engines before they look at the model's options
EVERYWHERE = "++ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=spec_plugin_verl"
LEAVE_OUT = f"leave out {FLAG}"
BOTH_PLACES = "rollouts both beside the actors and apart from them"
#: of verl's trainer; the last one with engines in processes of their own
MODES = ("sync", "colocate_async", "separate_async")
APART = MODES[-1]
DEVICES = ("cpu", "cuda")
_ROLLOUT, _MODEL, _ACTOR = (f"actor_rollout_ref.{section}." for section in ("rollout", "model", "actor"))
_VLLM = f"{_ROLLOUT}engine_kwargs.vllm."
_DTYPES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
NO_SIZE = "a size that is none"
#: which the draft shares with the policy
SHARED_MODULES = ("embed_tokens", "lm_head")
#: what we set in the engine ourselves
_OURS = ("speculative_config", "scheduler_cls", "worker_extension_cls")

#: an option, what it may be, what anything else is (with ``{value}`` where it is to be named), what to do
Refused = tuple[str, tuple[Any, ...], str, str]
_OFF = (None, False)
#: of a mixture of experts, verl has the actor take the routes that the engine took
_ROUTES = "the replay of the rollouts' routes (R3)"
_NOT_SHOWN = "nobody has shown that vLLM returns those of accepted tokens alone"
_OF_ROLLOUT: tuple[Refused, ...] = (
    ("name", ("vllm",), "rollouts by {value}", "set it to vllm"),
    ("pipeline_model_parallel_size", (1,), "pipeline parallel engines", "set it to 1"),
    ("data_parallel_size", (1,), "engine data parallel", "set it to 1: verl then starts more replicas"),
    ("expert_parallel_size", (None, 0, 1), "expert parallel engines", "set it to 1"),
    ("disaggregation.enabled", _OFF, "prefill-decode disaggregation", "set it to False"),
    ("qat.enable", _OFF, "quantized rollouts", f"set {_ACTOR}fsdp_config.qat.enable=False"),
    ("quantization", (None,), "quantized rollouts", "set it to null"),
    (
        "enable_rollout_routing_replay",
        _OFF,
        _ROUTES,
        f"set it to False, and router_replay.mode to R2, which replays the actor's own ({_NOT_SHOWN})",
    ),
)
_OF_VLLM: tuple[Refused, ...] = (
    ("quantization", (None,), "quantized rollouts", "remove it"),
    ("data_parallel_size", (None, 1), "engine data parallel", "remove it"),
    ("enable_expert_parallel", _OFF, "expert parallel engines", "remove it"),
)
_OF_THE_ROUTER: Refused = (
    "router_replay.mode",
    (None, "disabled", "R2"),
    _ROUTES,
    f"set it to R2, which replays the actor's own, or to disabled ({_NOT_SHOWN})",
)
_GRAPHS = (None, False, "none"), "CUDA graphs of Megatron actors", "remove it"
_OF_MEGATRON: tuple[Refused, ...] = (
    ("virtual_pipeline_model_parallel_size", (None, 1), "virtual pipelines of Megatron actors", "set it to null"),
    ("dynamic_context_parallel", _OFF, "dynamic context parallelism of Megatron actors", "set it to False"),
    ("use_megatron_fsdp", _OFF, "the FSDP of Megatron actors", "set it to False"),
    ("override_transformer_config.enable_cuda_graph", *_GRAPHS),
    ("override_transformer_config.external_cuda_graph", *_GRAPHS),
    ("override_transformer_config.cuda_graph_impl", *_GRAPHS),
    ("override_transformer_config.fp8", (None, False, "none"), "8-bit training of Megatron actors", "remove it"),
    _OF_THE_ROUTER,
)
#: verl's actors by ``actor.strategy``: the section of the backend's options, and what of them is refused by name; the
#: kit's shapes prove the rest
ACTORS: Mapping[str, tuple[str, tuple[Refused, ...]]] = {
    "fsdp": ("fsdp_config", ()),
    "fsdp2": ("fsdp_config", ()),
    "veomni": ("veomni", (_OF_THE_ROUTER,)),
    "megatron": ("megatron", _OF_MEGATRON),
}


def as_builtin(value: Any) -> Any:
    """Dicts and lists instead of OmegaConf's."""
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig | ListConfig) else value


def value_of(section: Any, path: str) -> Any:
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
    if is_on(raw) is False:
        raise SpecConfigError(
            f"{PREFIX[:-1]}={raw}: the flag is another option: {LEAVE_OUT}, and the run is a plain one"
        )
    if raw is not None and not isinstance(raw, Mapping):
        raise SpecConfigError(f"{PREFIX}*: expected options such as {PREFIX}k=3, got {raw!r}")
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
    given = as_builtin(value_of(rollout, "engine_kwargs.vllm")) or {}
    return {name: value for name, value in given.items() if value is not None}


def engine_arguments(rollout: Any) -> dict[str, Any]:
    """The engine's arguments that matter here, merged as verl merges them: ``engine_kwargs`` win over verl's own options."""
    same = ("dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "logprobs_mode", "quantization")
    own = {name: getattr(rollout, name) for name in (*same, "enforce_eager")}
    return {**own, "tensor_parallel_size": rollout.tensor_model_parallel_size, **engine_kwargs(rollout)}


def _length(arguments: Mapping[str, Any], hf_config: Mapping[str, Any], model: Any) -> int | None:
    """Most tokens of a text in the engine: what is asked for, else the model's positions as ``override_config`` changes them."""
    changed = as_builtin(getattr(model, "override_config", None)) or {}
    said = {**hf_config, **changed.get("model_config", changed)}
    positions = (value_of(said, path) for path in ("max_position_embeddings", "text_config.max_position_embeddings"))
    return next((length for length in (arguments["max_model_len"], *positions) if isinstance(length, int)), None)


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
        load_format=str(arguments.get("load_format", rollout.load_format)),
        sampling={
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "repetition_penalty": getattr(rollout, "repetition_penalty", 1.0),
        },
        **known,
    )


def lora(model: Any) -> str | None:
    """``merged`` or ``adapter``, and None without LoRA."""
    if not any((value_of(model, rank) or 0) > 0 for rank in ("lora_rank", "lora.rank")):
        return None  # whatever adapter a path names: verl loads none without a rank
    return "merged" if value_of(model, "lora.merge") else "adapter"


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
    custom = as_builtin(getattr(rollout, "custom", None))
    tree = {"actor_rollout_ref": {"rollout": {"custom": custom}}} if config is None else as_builtin(config)
    if isinstance(custom, Mapping) and tree.get(NAME) == custom.get(NAME):  # `+spec=on`: the one refers to the other
        tree = {name: section for name, section in tree.items() if name != NAME}
    yield from misplaced(tree)
    yield from _of_engine(rollout)
    yield from _refused(model, _MODEL, [("mtp.enable", _OFF, "a second drafting method (MTP)", "set it to False")])
    if lora(model) == "adapter":
        yield from _of_adapters(rollout, model)
    if device not in DEVICES:
        yield unsupported("trainer.device", device, f"the device {device}", f"use one of {', '.join(DEVICES)}")
    if config is not None:
        yield from _of_run(config)


def of_actor(strategy: str, options: Any, lora: bool) -> Iterator[Objection]:
    """What of an actor has not been shown to work.

    Args:
        strategy: verl's name of the backend.
        options: of the backend, verl's dataclass or the configuration that it is made of.
        lora: does the run train LoRA adapters.
    """
    if strategy not in ACTORS:
        instead = f"set it to {' or '.join(ACTORS)} (model_engine=dp, veomni or megatron)"
        yield unsupported(f"{_ACTOR}strategy", strategy, f"{strategy} actors", instead)
        return
    section, refused = ACTORS[strategy]
    yield from _refused(options, f"{_ACTOR}{section}.", refused)
    if lora and strategy == "megatron":
        instead = "train all weights, or set model_engine=dp with lora.merge=True"
        yield unsupported(f"{_MODEL}lora", "set", "LoRA in Megatron actors", instead)


def _refused(section: Any, prefix: str, table: Iterable[Refused]) -> Iterator[Objection]:
    for option, allowed, what, instead in table:
        if (value := value_of(section, option)) not in allowed:
            yield unsupported(f"{prefix}{option}", value, what.format(value=value), instead)


def _no_sizes(rollout: Any, model: Any) -> Iterator[Objection]:
    """Sizes that are compared here and are none; verl passes them on to where nobody says which option it was."""
    given = engine_kwargs(rollout)
    sizes = {f"{_ROLLOUT}{name}": value_of(rollout, name) for name in ("max_num_seqs", "tensor_model_parallel_size")}
    sizes |= {f"{_VLLM}{name}": given[name] for name in ("max_num_seqs", "tensor_parallel_size") if name in given}
    or_none = {f"{_MODEL}{name}": value_of(model, name) for name in ("lora_rank", "lora.rank")}
    or_none[f"{_ROLLOUT}max_model_len"] = value_of(rollout, "max_model_len")
    for option, value in {**sizes, **{name: value or 1 for name, value in or_none.items()}}.items():
        if not isinstance(value, int) or isinstance(value, bool) or (value < 1 and option in sizes):
            yield Objection(option, str(value), NO_SIZE, "this must be a whole number, 1 or more", "set one")


def _of_engine(rollout: Any) -> Iterator[Objection]:
    given = engine_kwargs(rollout)
    yield from _refused(rollout, _ROLLOUT, _OF_ROLLOUT)
    yield from _refused(given, _VLLM, _OF_VLLM)
    if given.get("tensor_parallel_size", ranks := rollout.tensor_model_parallel_size) != ranks:
        what = "an engine of another size than its replica"
        yield unsupported(f"{_VLLM}tensor_parallel_size", given["tensor_parallel_size"], what, "remove it")
    for name in (name for name in _OURS if name in given):
        what = "engine options that spec-plugin sets"
        yield Objection(f"{_VLLM}{name}", str(given[name]), what, "spec-plugin sets it too", "remove it")
    backend, dtype = rollout.checkpoint_engine.backend, engine_arguments(rollout)["dtype"]
    if str(backend).startswith("delta"):
        option = f"{_ROLLOUT}checkpoint_engine.backend"
        yield unsupported(option, backend, f"weight syncs by {backend}", "set it to naive, or nccl")
    if _DTYPES.get(dtype, dtype) not in _DTYPES.values():
        what = "dtypes that are not named (draft and tolerance need one)"
        instead = f"set one of {', '.join(sorted(set(_DTYPES.values())))}"
        yield unsupported(f"{_ROLLOUT}dtype", repr(dtype), what, instead)


def _of_adapters(rollout: Any, model: Any) -> Iterator[Objection]:
    """What stands in the way of LoRA adapters that the engine serves."""
    if (backend := rollout.checkpoint_engine.backend) != "naive":
        where, instead = f"{_ROLLOUT}checkpoint_engine.backend", f"set {_MODEL}lora.merge=True"
        yield unsupported(where, backend, "LoRA adapters in engines apart from the actor", instead)
    trained = as_builtin(value_of(model, "target_modules")) or ()
    names = (trained,) if isinstance(trained, str) else tuple(map(str, trained))
    if shared := [name for name in names if name.rpartition(".")[2] in SHARED_MODULES]:
        instead = "remove them: the draft uses the target's own"
        yield unsupported(f"{_MODEL}target_modules", shared, "LoRA adapters of the embedding or the LM head", instead)


def _of_run(config: Any) -> Iterator[Objection]:
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    section = ACTORS[actor.strategy][0] if actor.strategy in ACTORS else ""
    yield from of_actor(actor.strategy, value_of(actor, section), lora(model) is not None)
    mode, hybrid = config.trainer.v1.trainer_mode, config.actor_rollout_ref.hybrid_engine
    both = (_OFF, BOTH_PLACES, "set it to False")
    other_mode = f"set it to {', '.join(MODES[:-1])} or {APART}"
    yield from _refused(
        config,
        "",
        [
            ("trainer.use_v1", (True,), "verl's legacy trainer", "set it to True"),
            ("trainer.v1.trainer_mode", MODES, "the trainer mode {value}", other_mode),
            ("async_training.use_trainer_do_validate", *both),  # of fully_async, as the next one
            ("async_training.use_dynamic_resource_scheduling", *both),
        ],
    )
    engines = "actor_rollout_ref.hybrid_engine"
    if mode == APART and hybrid:
        instead = f"set it to False, or another trainer.v1.trainer_mode than {APART}"
        yield unsupported(engines, True, BOTH_PLACES, instead)
    elif mode != APART and mode in MODES and not hybrid:
        instead = f"set it to True, or trainer.v1.trainer_mode={APART}"
        yield unsupported(engines, False, "rollouts outside of the actors' processes", instead)
