"""What OpenRLHF's own flags say of the target, read once at the edge; every objection. Ours: ``spec_plugin.plan.arguments``."""

from __future__ import annotations

import argparse
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from spec_plugin.adapter import Objection, SpecConfig, TargetInfo, keeps_states, load_hf_config, refuse, unsupported

LEAVE_OUT = "leave out --spec.enable"
MODEL, CORRECTION = "--actor.model_name_or_path", "--algo.advantage.is_correction_level"

#: of OpenRLHF's flags the few that matter here: the name under which each is read, and OpenRLHF's default
_FLAGS: Mapping[str, tuple[str, Any]] = {
    MODEL: ("model", None),
    "--vllm.num_engines": ("engines", 0),
    "--vllm.tensor_parallel_size": ("tensor_parallel", 1),
    "--vllm.enable_sleep": ("sleep", False),
    "--rollout.temperature": ("temperature", 1.0),
    "--rollout.top_p": ("top_p", 1.0),
    "--data.max_len": ("max_len", 2048),
    "--ds.param_dtype": ("param_dtype", "bf16"),
    "--ds.lora.rank": ("lora_rank", 0),
    "--ds.load_in_4bit": ("load_in_4bit", False),
    "--ds.ring_attn_size": ("ring", 1),
    "--ds.packing_samples": ("packed", False),
    "--ds.zero_stage": ("zero_stage", 2),
    "--ds.tensor_parallel_size": ("actor_tensor_parallel", 1),
    "--actor.num_nodes": ("nodes", 1),
    "--actor.num_gpus_per_node": ("gpus_per_node", 8),
    "--train.dynamic_batch_enable": ("dynamic_batch", False),
    "--train.async_enable": ("asynchronous", False),
    "--train.partial_rollout_enable": ("partial", False),
    "--train.async_queue_size": ("queue", 1),
    "--train.full_determinism_enable": ("deterministic", False),
    "--data.max_images_per_prompt": ("images", 0),
    "--critic.freezing_steps": ("freezing", -1),
    CORRECTION: ("correction", "off"),
}
_AT_LEAST_ONE = ("tensor_parallel", "max_len", "nodes", "gpus_per_node", "ring")
#: what each may be, what anything else would be, and what to do
_REFUSED: Mapping[str, tuple[Callable[[Any], bool], str, str]] = {
    "model": (lambda name: name is not None, "a run without a policy", "name a model"),
    "engines": (lambda count: count >= 1, "rollouts without vLLM", "set it to 1 or more"),
    "lora_rank": (
        lambda rank: rank <= 0,
        "LoRA (OpenRLHF sends adapters unmerged, under names that vLLM does not load)",
        "set it to 0",
    ),
    "load_in_4bit": (operator.not_, "a 4-bit policy", "leave it out"),
    "actor_tensor_parallel": (lambda size: size == 1, "a tensor parallel actor", "set it to 1"),
    "freezing": (
        lambda steps: steps <= 0,
        "steps that train the critic alone (what they sample stays in the actor's buffer over several weight syncs)",
        "set it to -1",
    ),
    "images": (lambda count: count <= 0, "vision-language policies", "set it to 0"),
    "deterministic": (operator.not_, "an engine in the actor's own process", "leave it out"),
    "param_dtype": (lambda name: name == "bf16", "other dtypes (the engine is bfloat16)", "set it to bf16"),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag, (name, default) in _FLAGS.items():
        if default is False:
            parser.add_argument(flag, dest=name, action="store_true")
        else:
            parser.add_argument(flag, dest=name, default=default, type=str if default is None else type(default))
    return parser


def read_flags(theirs: Sequence[str]) -> tuple[argparse.Namespace, tuple[Objection, ...]]:
    """The flags that matter here; one whose value cannot be read has its default, and an objection."""
    rest = list(theirs)
    found: list[Objection] = []
    while True:
        try:
            return _parser().parse_known_args(rest)[0], tuple(found)
        except argparse.ArgumentError as error:
            flag = str(error.argument_name)
            at = next(i for i, argument in enumerate(rest) if argument.partition("=")[0] == flag)
            value = rest[at].partition("=")[2] or " ".join(rest[at + 1 : at + 2])
            found.append(
                Objection(
                    flag, value, "a flag that cannot be read", str(error.message), "correct its value", "openrlhf"
                )
            )
            del rest[at]


def objections(flags: argparse.Namespace) -> Iterator[Objection]:
    """Everything in OpenRLHF's flags that stands in the way, each with what to do instead.

    Args:
        flags: of ``read_flags``.
    """
    for flag, (name, _) in _FLAGS.items():
        value = getattr(flags, name)
        if name in _AT_LEAST_ONE and value < 1:
            yield Objection(flag, str(value), "a size below 1", "there is no such size", "set it to 1 or more")
        if name in _REFUSED and not _REFUSED[name][0](value):
            yield unsupported(flag, value, *_REFUSED[name][1:])


def of_states(model: str, hf_config: Mapping[str, Any], config: SpecConfig) -> Iterator[Objection]:
    """A target with recurrent states, unless it is to be tried: no run with these actors was shown.

    Args:
        model: as the user gives it.
        hf_config: its config.json.
        config: the run's options.
    """
    if keeps_states(hf_config) and config.recurrent_states != "try":
        instead = "set --spec.recurrent_states try, which no run has shown"
        yield unsupported(MODEL, model, "recurrent states in DeepSpeed actors", instead)


def target_info(flags: argparse.Namespace, hf_config: dict[str, Any], **known: Any) -> TargetInfo:
    """What OpenRLHF's flags tell of the target and its engine.

    Args:
        flags: of ``read_flags``.
        hf_config: the model's config.json.
        known: further fields of TargetInfo.
    """
    return TargetInfo(
        path=flags.model,
        hf_config=hf_config,
        dtype="bfloat16",  # OpenRLHF builds its engines so, and asserts that the actor's parameters are
        tensor_parallel=flags.tensor_parallel,
        max_model_len=flags.max_len,
        sampling={"temperature": flags.temperature, "top_p": flags.top_p, "top_k": -1, "min_tokens": 1},
        actor_dtype="bfloat16",
        **known,
    )


def read_target(theirs: Sequence[str]) -> TargetInfo:
    """What OpenRLHF's flags tell of the target and its engine; ``max_num_seqs`` is the engine's to say.

    Raises:
        SpecConfigError: if the run has something that is not supported, or the target's config cannot be read.
    """
    flags, unreadable = read_flags(theirs)
    refuse((*unreadable, *objections(flags)), LEAVE_OUT)
    return target_info(flags, load_hf_config(flags.model, MODEL), device_type=_device_type())


def _device_type() -> str:
    """Of the engines; the driver of ``ray job submit`` may sit on a machine without a GPU."""
    from vllm.platforms import current_platform

    return "cpu" if current_platform.is_cpu() else "cuda"
