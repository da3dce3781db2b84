"""What the tables of bad input share: a target and a draft that are right, and where each of the two is read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draft_training import DraftConfig, DraftTrainer, TrainSettings
from spec_plugin import SpecConfig, SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.commands.check import judge_run, model_from
from spec_plugin.commands.doctor import examine_checkpoints
from spec_plugin.lifecycle.manager import create_manager, method_of
from spec_plugin.plan.refusals import OURS, read_json

TARGET = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
NAN, INFINITE, HUGE = math.nan, math.inf, 10**400
#: ways in which a config.json says one number wrongly, each with what the message must show of it
WRONG_NUMBERS: Mapping[str, tuple[Any, str]] = {
    "text": ("64", "='64'"),
    "list": ([64], "=[64]"),
    "mapping": ({"a": 1}, "={'a': 1}"),
    "true": (True, "=True"),
    "negative": (-3, "=-3"),
    "zero": (0, "=0"),
    "fraction": (2.5, "=2.5"),
    "NaN": (NAN, "=nan"),
    "infinite": (INFINITE, "=inf"),
    "absurd": (10**18, "=1000000000000000000"),
    "huge": (HUGE, "=1000000000"),
}


def written(folder: Path, config: Any) -> Path:
    """A folder with this config.json, given as its text or as what it says."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def draft_tensors(config: DraftConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Of a newborn draft."""
    return DraftTrainer(config, TrainSettings(), device="cpu", seed=seed).engine_tensors()


def draft_in(folder: Path, changes: Mapping[str, Any] = {}, pruned: int | None = None) -> Path:
    """A whole draft for TARGET, whose config.json is then changed."""
    config = DraftConfig.from_target(TARGET, draft_vocab_size=pruned)
    written(folder, {**config.to_hf(), **changes})
    save_file(draft_tensors(config), folder / "model.safetensors")
    return folder


def of_a_run(target: Path, **options: Any) -> str:
    """What a run says that starts with this target; empty where it starts."""
    try:
        info = TargetInfo(str(target), read_json(target / "config.json"), "float32", max_num_seqs=8)
        found = method_of(SpecConfig.parse(options), info, create_manager((), (), load_entry_points=False))
        found.speculative_config()
    except SpecConfigError as error:
        return str(error)
    return ""


def of_the_doctor(target: Path, draft: Path | None = None) -> str:
    """What the doctor finds wrong with a target, or a draft for it."""
    return "\n".join(f.detail for f in examine_checkpoints(target, draft) if f.state != "ok")


def of_the_check(target: Path, **options: Any) -> str:
    """What ``spec-plugin check`` objects to."""
    flags = [part for name, value in options.items() for part in (f"--spec.{name}", str(value))]
    given = ("--actor.model_name_or_path", str(target), "--vllm.num_engines", "1", *flags)
    try:
        found = judge_run("openrlhf", given, model_from(target / "config.json")).objections
        return "\n".join(str(o) for o in found if o.by == OURS)  # OpenRLHF itself may not be here
    except SpecConfigError as error:
        return str(error)


READERS: Mapping[str, Callable[..., str]] = {"run": of_a_run, "check": of_the_check}


def missing(said: str, *parts: str) -> Iterator[str]:
    """What a message should have said and has not."""
    return (part for part in parts if part not in said)
