"""What the parts run on: the sizes of each shape, the small policy with its draft, and both in the large shape."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from draft_training.checkpoint import replacing_folder
from examples.bench import large, workload
from examples.bench.card_parts.record import Record
from examples.bench.common import say

#: drafted tokens that the small drafts are trained for
UNROLLED = 7
#: optimizer steps of each of them: one that is nearly always right, and one as good as those of real policies
DRAFTS = {"draft": 300, "mediocre": 16}


@dataclass(frozen=True)
class GrpoSizes:
    """Of the trainer's run."""

    shape: str  # of the policy
    sequences: int  # of a step, all at once
    samples: int  # of a prompt
    micro_batch: int  # sequences of one backward pass
    tokens: int  # of a response
    steps: int
    each: int  # steps of a turn


@dataclass(frozen=True)
class Sizes:
    """How much each part does."""

    shape: str  # of ``large.SHAPES``
    dtype: str  # of engine and draft
    tokens: int  # per request of a timed round
    rounds: int
    step_batches: tuple[int, ...]
    step_widths: tuple[int, ...]  # k
    rollout_batches: tuple[int, ...]
    seeds: int  # prompts of the greedy comparison
    scored: int  # tokens of each arm that are compared with HF
    lengths: tuple[int, ...]  # of the compared responses
    self_test_seconds: float
    sleeps: int
    sleep_requests: int
    peak_batches: tuple[int, ...]
    train_tokens: tuple[int, ...]
    train_steps: int
    pruned: tuple[int, ...]  # sizes of a draft's vocabulary, beside all of it
    grpo: GrpoSizes


SIZES = {
    "8b": Sizes(
        shape="8b",
        dtype="bfloat16",
        tokens=48,
        rounds=3,
        step_batches=(32, 1, 128, 8),
        step_widths=(0, 1, 3, 7),
        rollout_batches=(16, 1, 64, 256, 4),
        seeds=200,
        scored=250_000,
        lengths=(16, 48, 128, 256),
        self_test_seconds=30.0,
        sleeps=20,
        sleep_requests=64,
        peak_batches=(256, 1024),
        train_tokens=(1024, 8192),
        train_steps=6,
        pruned=(32_768,),
        grpo=GrpoSizes("1.7b", sequences=32, samples=8, micro_batch=2, tokens=1024, steps=10, each=3),
    ),
    "tiny": Sizes(
        shape="small",
        dtype="float32",
        tokens=12,
        rounds=1,
        step_batches=(1, 4),
        step_widths=(0, 1, 3, 7),
        rollout_batches=(4,),
        seeds=8,
        scored=200,
        lengths=(8, 16),
        self_test_seconds=10.0,
        sleeps=1,
        sleep_requests=4,
        peak_batches=(4,),
        train_tokens=(256,),
        train_steps=2,
        pruned=(128,),
        grpo=GrpoSizes("small", sequences=8, samples=4, micro_batch=8, tokens=32, steps=3, each=1),
    ),
}


#: parts that need no large model, and those that make what they need
TINY_PARTS, WITHOUT_MODELS = ("smoke",), ("trl", "head")


@dataclass(frozen=True)
class Models:
    """Folders of what the engines serve."""

    small: Path  # policy
    target: Path  # in the large shape
    draft: Path  # of the target, nearly always right
    mediocre: Path  # another
    promised: float  # acceptance length that training predicts for that one, ``UNROLLED`` drafted


def sizes_of(record: Record) -> Sizes:
    """Those of the shape that was asked for."""
    return SIZES[record.settings["shape"]]


def small_models(folder: Path, device: str) -> dict[str, Path]:
    """The small policy and its trained drafts, in a folder that can be carried to another machine.

    Args:
        folder: with ``policy`` and ``DRAFTS`` in it; made on the first call, which takes minutes.
        device: where the drafts are trained.
    """
    found = {name: folder / name for name in ("policy", *DRAFTS)}
    if not all(path.exists() for path in found.values()):
        target = workload.default_target()
        _copy(target, found["policy"])
        for name, steps in DRAFTS.items():
            settings = workload.DraftSettings(k=UNROLLED, steps=steps)
            made = workload.trained_draft(
                target, lambda count: workload.addition_prompts(target, count, seed=1), settings, device
            )
            _copy(made.path, found[name])
            say(f"{name}: acceptance length on held-out text, {UNROLLED} drafted: {made.expected_acceptance:.2f}")
    return found


def _copy(source: Path, folder: Path) -> None:
    with replacing_folder(folder) as fresh:
        shutil.copytree(source, fresh, dirs_exist_ok=True)


def models(record: Record, device: str) -> Models:
    """Policy and drafts in the shape that the part wants, made on the first call."""
    settings = record.settings
    sizes = SIZES["tiny"] if record.content["part"] in TINY_PARTS else sizes_of(record)
    small = small_models(Path(settings["small"]), device)
    work, shape, dtype = Path(settings["work"]), large.SHAPES[sizes.shape], settings["dtype"]
    work.mkdir(parents=True, exist_ok=True)
    target = large.embedded_target(small["policy"], shape, dtype, work)
    drafts = {name: large.embedded_draft(small[name], small["policy"], target, dtype, work) for name in DRAFTS}
    promised = json.loads((small["mediocre"] / "bench.json").read_text())["expected_acceptance"]
    return Models(small["policy"], target, drafts["draft"], drafts["mediocre"], promised)


def mixed_prompts(small: Path, count: int, seed: int) -> list[list[int]]:
    """Questions, of whose answers the policy is sure, and in every other place noise, where it is not.

    Args:
        small: folder of the small policy.
        count: of prompts.
        seed: other seeds give other prompts.
    """
    asked = workload.addition_prompts(small, (count + 1) // 2, seed)
    rng = random.Random(seed)
    known = sorted({token for prompt in asked for token in prompt})
    noise = [[rng.choice(known) for _ in range(16)] for _ in range(count // 2)]
    mixed = [prompt for pair in zip(asked, noise, strict=False) for prompt in pair]
    return (mixed + asked[len(noise) :])[:count]
