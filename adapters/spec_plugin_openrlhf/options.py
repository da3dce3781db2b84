"""What OpenRLHF's own flags say of the target, read once at the edge; refusals. Our flags: ``spec_plugin.arguments``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_plugin.errors import SpecConfigError
from spec_plugin.events import TargetInfo


def _parser() -> argparse.ArgumentParser:
    """The few of OpenRLHF's flags that matter here, with its defaults."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--actor.model_name_or_path", dest="model")
    parser.add_argument("--vllm.num_engines", dest="engines", type=int, default=0)
    parser.add_argument("--vllm.tensor_parallel_size", dest="tensor_parallel", type=int, default=1)
    parser.add_argument("--rollout.temperature", dest="temperature", type=float, default=1.0)
    parser.add_argument("--rollout.top_p", dest="top_p", type=float, default=1.0)
    parser.add_argument("--data.max_len", dest="max_len", type=int, default=2048)
    parser.add_argument("--ds.param_dtype", dest="param_dtype", default="bf16")
    parser.add_argument("--ds.lora.rank", dest="lora_rank", type=int, default=0)
    parser.add_argument("--ds.load_in_4bit", dest="load_in_4bit", action="store_true")
    parser.add_argument("--ds.tensor_parallel_size", dest="actor_tensor_parallel", type=int, default=1)
    parser.add_argument("--data.max_images_per_prompt", dest="images", type=int, default=0)
    parser.add_argument("--train.full_determinism_enable", dest="deterministic", action="store_true")
    return parser


def read_target(theirs: Sequence[str]) -> TargetInfo:
    """What OpenRLHF's flags tell of the target and its engine; ``max_num_seqs`` is the engine's to say.

    Raises:
        SpecConfigError: if the run has something that is not supported, or the target's config cannot be read.
    """
    flags, _ = _parser().parse_known_args(theirs)
    refusals = (
        (flags.model is None, "--actor.model_name_or_path", "a run without a policy", "a model"),
        (flags.engines < 1, "--vllm.num_engines", "rollouts without vLLM", "1 or more"),
        (flags.lora_rank > 0, "--ds.lora.rank", "LoRA", "0"),
        (flags.load_in_4bit, "--ds.load_in_4bit", "a 4-bit policy", "nothing: leave it out"),
        (flags.actor_tensor_parallel != 1, "--ds.tensor_parallel_size", "a tensor parallel actor", "1"),
        (flags.images > 0, "--data.max_images_per_prompt", "vision-language policies", "0"),
        (flags.deterministic, "--train.full_determinism_enable", "an engine in the actor's own process", "nothing"),
        (flags.param_dtype != "bf16", "--ds.param_dtype", "other dtypes (the engine is bfloat16)", "bf16"),
    )
    for refused, option, what, instead in refusals:
        if refused:
            raise SpecConfigError(
                f"spec-plugin does not support {what} yet: set {option} {instead}, or leave out --spec.enable"
            )
    return TargetInfo(
        path=flags.model,
        hf_config=_hf_config(flags.model),
        dtype="bfloat16",  # OpenRLHF builds its engines so, and asserts that the actor's parameters are
        device_type=_device_type(),
        tensor_parallel=flags.tensor_parallel,
        max_model_len=flags.max_len,
        sampling={"temperature": flags.temperature, "top_p": flags.top_p, "top_k": -1, "min_tokens": 1},
        actor_dtype="bfloat16",
    )


def _hf_config(model: str) -> dict[str, Any]:
    """config.json of a folder, or of a model on the hub."""
    try:
        file = Path(model) / "config.json"
        if not file.exists():
            from transformers.utils import cached_file

            file = Path(str(cached_file(model, "config.json")))
        config: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise SpecConfigError(f"--actor.model_name_or_path {model}: its config.json cannot be read: {error}") from error
    return config


def _device_type() -> str:
    """Of the engines; the driver of ``ray job submit`` may sit on a machine without a GPU."""
    from vllm.platforms import current_platform

    return "cpu" if current_platform.is_cpu() else "cuda"
