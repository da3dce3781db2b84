"""What OpenRLHF's own flags say of the target, read once at the edge; every objection. Our flags: ``spec_plugin.arguments``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spec_plugin.adapter import Objection, SpecConfig, TargetInfo, keeps_states, load_hf_config, refuse, unsupported

LEAVE_OUT = "leave out --spec.enable"
MODEL = "--actor.model_name_or_path"


_AT_LEAST_ONE = {
    "tensor_parallel": "--vllm.tensor_parallel_size",
    "max_len": "--data.max_len",
    "nodes": "--actor.num_nodes",
    "gpus_per_node": "--actor.num_gpus_per_node",
    "ring": "--ds.ring_attn_size",
}


def _parser() -> argparse.ArgumentParser:
    """The few of OpenRLHF's flags that matter here, with its defaults."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(MODEL, dest="model")
    parser.add_argument("--vllm.num_engines", dest="engines", type=int, default=0)
    parser.add_argument("--vllm.tensor_parallel_size", dest="tensor_parallel", type=int, default=1)
    parser.add_argument("--vllm.enforce_eager", dest="eager", action="store_true")
    parser.add_argument("--vllm.enable_sleep", dest="sleep", action="store_true")
    parser.add_argument("--rollout.temperature", dest="temperature", type=float, default=1.0)
    parser.add_argument("--rollout.top_p", dest="top_p", type=float, default=1.0)
    parser.add_argument("--data.max_len", dest="max_len", type=int, default=2048)
    parser.add_argument("--ds.param_dtype", dest="param_dtype", default="bf16")
    parser.add_argument("--ds.lora.rank", dest="lora_rank", type=int, default=0)
    parser.add_argument("--ds.load_in_4bit", dest="load_in_4bit", action="store_true")
    parser.add_argument("--ds.ring_attn_size", dest="ring", type=int, default=1)
    parser.add_argument("--ds.packing_samples", dest="packed", action="store_true")
    parser.add_argument("--ds.zero_stage", dest="zero_stage", type=int, default=2)
    parser.add_argument("--ds.tensor_parallel_size", dest="actor_tensor_parallel", type=int, default=1)
    parser.add_argument("--actor.num_nodes", dest="nodes", type=int, default=1)
    parser.add_argument("--actor.num_gpus_per_node", dest="gpus_per_node", type=int, default=8)
    parser.add_argument("--train.dynamic_batch_enable", dest="dynamic_batch", action="store_true")
    parser.add_argument("--train.async_enable", dest="asynchronous", action="store_true")
    parser.add_argument("--train.partial_rollout_enable", dest="partial", action="store_true")
    parser.add_argument("--train.async_queue_size", dest="queue", type=int, default=1)
    parser.add_argument("--train.full_determinism_enable", dest="deterministic", action="store_true")
    parser.add_argument("--data.max_images_per_prompt", dest="images", type=int, default=0)
    parser.add_argument("--critic.freezing_steps", dest="freezing", type=int, default=-1)
    parser.add_argument("--algo.advantage.is_correction_level", dest="correction", default="off")
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
    for dest, option in _AT_LEAST_ONE.items():
        if (size := getattr(flags, dest)) < 1:
            yield Objection(option, str(size), "a size below 1", "there is no such size", "set it to 1 or more")
    checks = (
        (flags.model is None, MODEL, None, "a run without a policy", "name a model"),
        (flags.engines < 1, "--vllm.num_engines", flags.engines, "rollouts without vLLM", "set it to 1 or more"),
        (
            flags.lora_rank > 0,
            "--ds.lora.rank",
            flags.lora_rank,
            "LoRA (OpenRLHF sends adapters unmerged, under names that vLLM does not load)",
            "set it to 0",
        ),
        (flags.load_in_4bit, "--ds.load_in_4bit", True, "a 4-bit policy", "leave it out"),
        (
            flags.actor_tensor_parallel != 1,
            "--ds.tensor_parallel_size",
            flags.actor_tensor_parallel,
            "a tensor parallel actor",
            "set it to 1",
        ),
        (
            flags.freezing > 0,
            "--critic.freezing_steps",
            flags.freezing,
            "steps that train the critic alone (what they sample stays in the actor's buffer over several weight syncs)",
            "set it to -1",
        ),
        (flags.images > 0, "--data.max_images_per_prompt", flags.images, "vision-language policies", "set it to 0"),
        (
            flags.deterministic,
            "--train.full_determinism_enable",
            True,
            "an engine in the actor's own process",
            "leave it out",
        ),
        (
            flags.param_dtype != "bf16",
            "--ds.param_dtype",
            flags.param_dtype,
            "other dtypes (the engine is bfloat16)",
            "set it to bf16",
        ),
    )
    for refused, option, value, what, instead in checks:
        if refused:
            yield unsupported(option, value, what, instead)


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
