"""verl's actors by backend: where its options lie, what of them is refused by name, which shapes of the kit prove the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from spec_plugin.adapter import Objection, unsupported

_ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class ActorBackend:
    """One backend, as ``actor.strategy`` names it."""

    section: str  # of its options, in the actor's
    refused: Callable[[Any, bool], Iterator[Objection]] = lambda _options, _lora: iter(())
    shapes: Callable[[Any], Mapping[str, bool]] = lambda _options: {}  # of the kit: is it one that these options need


def objections(strategy: str, options: Any, lora: bool) -> Iterator[Objection]:
    """What of an actor has not been shown to work.

    Args:
        strategy: verl's name of the backend.
        options: of the backend, verl's dataclass or the configuration that it is made of.
        lora: does the run train LoRA adapters.
    """
    if strategy not in ACTORS:
        instead = f"set it to {' or '.join(ACTORS)} (model_engine=dp, veomni or megatron)"
        yield unsupported(f"{_ACTOR}.strategy", strategy, f"{strategy} actors", instead)
    else:
        yield from ACTORS[strategy].refused(options, lora)


def options_of(actor: Any) -> Any:
    """The options of an actor's backend, in verl's configuration of it; None where that backend is not known."""
    return actor.get(ACTORS[actor.strategy].section) if actor.strategy in ACTORS else None


def _size(options: Any, name: str) -> int:
    size = getattr(options, name, None)
    return size if isinstance(size, int) and not isinstance(size, bool) else 1


#: switches of a Megatron actor: the option, what it turns on, what to do
_MEGATRON_SWITCHES = (
    ("dynamic_context_parallel", "dynamic context parallelism", "set it to False"),
    ("use_megatron_fsdp", "the FSDP", "set it to False"),
    ("override_transformer_config.enable_cuda_graph", "CUDA graphs", "remove it"),
    ("override_transformer_config.external_cuda_graph", "CUDA graphs", "remove it"),
    ("override_transformer_config.cuda_graph_impl", "CUDA graphs", "remove it"),
    ("override_transformer_config.fp8", "8-bit training", "remove it"),
)


def _megatron(options: Any, lora: bool) -> Iterator[Objection]:
    def no(option: str, value: Any, what: str, instead: str) -> Objection:
        return unsupported(f"{_ACTOR}.megatron.{option}", value, f"{what} of Megatron actors", instead)

    if (size := _size(options, "virtual_pipeline_model_parallel_size")) > 1:
        yield no("virtual_pipeline_model_parallel_size", size, "virtual pipelines", "set it to null")
    for switch, what, instead in _MEGATRON_SWITCHES:
        section, _, name = switch.rpartition(".")
        given = (getattr(options, section, None) or {}).get(name) if section else getattr(options, name, None)
        if given not in (None, False, "none"):
            yield no(switch, given, what, instead)
    yield from _routing_replay("megatron", options)
    if lora:
        instead = "train all weights, or set model_engine=dp with lora.merge=True"
        yield unsupported("actor_rollout_ref.model.lora", "set", "LoRA in Megatron actors", instead)


def rollouts_routing(option: str, value: Any, instead: str) -> Objection:
    """Of a mixture of experts, verl has the actor take the routes that the engine took (R3).

    Args:
        option: that asks for it.
        value: that it has.
        instead: an imperative.
    """
    what = "the replay of the rollouts' routes (R3)"
    why = f"spec-plugin does not support {what}: nobody has shown that vLLM returns those of accepted tokens alone"
    return Objection(option, str(value), what, why, instead)


def _routing_replay(section: str, options: Any, _lora: bool = False) -> Iterator[Objection]:
    if getattr(getattr(options, "router_replay", None), "mode", None) == "R3":
        instead = "set it to R2, which replays the actor's own, or to disabled"
        yield rollouts_routing(f"{_ACTOR}.{section}.router_replay.mode", "R3", instead)


def _megatron_shapes(options: Any) -> Mapping[str, bool]:
    tensor, pipeline = _size(options, "tensor_model_parallel_size"), _size(options, "pipeline_model_parallel_size")
    context, experts = _size(options, "context_parallel_size"), _size(options, "expert_model_parallel_size")
    return {
        "megatron": max(tensor, pipeline, context, experts) == 1,
        "megatron-tp2": tensor > 1,
        "megatron-pp2": pipeline > 1,
        "megatron-cp2": context > 1,
        "megatron-ep2": experts > 1,
    }


ACTORS = {
    "fsdp": ActorBackend("fsdp_config"),
    "fsdp2": ActorBackend("fsdp_config"),
    "veomni": ActorBackend("veomni", partial(_routing_replay, "veomni"), lambda _: {"veomni": True}),
    "megatron": ActorBackend("megatron", _megatron, _megatron_shapes),
}
