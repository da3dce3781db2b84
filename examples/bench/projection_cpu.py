"""What a projection is held against: a start-up calibration of a CPU engine, and the rollouts that it must predict."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from examples.bench import common, workload  # noqa: E402
from examples.bench.common import interleave, say, spread  # noqa: E402
from examples.bench.speedup import prepare_draft  # noqa: E402
from spec_plugin.api.events import StepTiming  # noqa: E402

if TYPE_CHECKING:
    from examples.bench.engines import Remote, Timing

HELP = """Measure one CPU engine twice: as the start-up calibration does, and in whole rollouts with each k.

The calibration is that of the plugin (batch sizes 1, 8 and 32; k = 0, 1, 3 and --k; requests of 17 tokens). The rollouts
are those of control.py: 48 tokens at each --batch, and 32 requests of different lengths that drain to one, within answers as a
trainer's end, and far beyond their end, where a draft knows nothing. By two clocks: with --threads 1, CPU seconds are near those
of an idle machine. projection.py predicts the second from the first.
"""

CALIBRATED = (1, 8, 32)
REQUESTS = 32  # of the batch that drains
#: of the calibration, as in ``spec_plugin.engine.selftest.test``: tokens of a request, rounds of all kinds and batch sizes
TOKENS, CALIBRATION_ROUNDS = 17, 3
CLOCKS = ("wall", "cpu")
#: glibc maps what is larger than 32 MB anew each time: padded MLPs pass that at some hundred tokens a step, whose page faults
#: then take as long as its products. No card has that, so the engine's process keeps what it once has
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


@dataclass(frozen=True)
class Calibration:
    """What the calibration measured."""

    steps: dict[str, list[StepTiming]]  # by clock
    drafts: int
    accepted_per_pos: tuple[int, ...]


@dataclass(frozen=True)
class Measured:
    """Rollouts of one regime with one k."""

    regime: str
    k: int
    lengths: tuple[int, ...]
    prompt: float  # mean tokens
    seconds: dict[str, list[float]]  # by clock, of each round
    acceptance_length: float
    drafts: int = 0  # verification steps of all rounds
    accepted_per_pos: tuple[int, ...] = ()


@click.command(help=HELP, context_settings={"max_content_width": 120, "show_default": True})
@click.option("--target", type=click.Path(path_type=Path, exists=True), help="Folder of a dense Qwen3, Qwen2 or Llama.")
@click.option("--draft", type=click.Path(path_type=Path, exists=True), help="Folder of a draft: nothing is trained.")
@click.option("--width", default=32768, help="Units of the padded MLPs (32768: 101M parameters); 0: not padded.")
@click.option("--k", default=8, help="Most tokens drafted per step.")
@click.option("--fixed", "ks", multiple=True, type=int, default=(0, 3, 8), help="k of the rollouts; may be repeated.")
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8, 32), help="May be repeated.")
@click.option("--rounds", default=2, help="Rounds of rollouts; the calibration has warmed up.")
@click.option("--tokens", default=48, help="Tokens per request.")
@click.option("--rollouts", default=500, help="Rollouts that the draft is trained on.")
@click.option("--train-steps", default=300, help="Optimizer steps of draft training.")
@click.option("--threads", default=1, help="Compute threads.")
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of the JSON.")
def main(**options: Any) -> None:
    """Prepare, measure, write."""
    common.prepare_process(options["threads"])
    target = options["target"] or workload.default_target()
    draft = prepare_draft(target, {**options, "dtype": "float32", "file": None, "temperature": 1.0}, "cpu")
    served = workload.padded_target(target, options["width"], "float32") if options["width"] else target

    from examples.bench.engines import EngineSettings, Remote  # slow to import

    say("starting the engine")
    os.environ.update(ALLOCATOR)
    engine = Remote(options["threads"], "flag", served, EngineSettings(), draft, options["k"]).wait()
    calibration = calibrate(engine, target, options["k"])
    found = [row for regime in regimes(options) for row in measure(engine, target, *regime, options)]
    engine.close()
    results = {"calibration": calibration, "rollouts": found}
    common.write_results("projection-cpu", options, results, common.environment("cpu"), options["out"])


def regimes(options: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Name and lengths, as in control.py."""
    rng, tokens = random.Random(0), options["tokens"]
    tail = tuple(min(4 * tokens, 8 + int(rng.expovariate(1.5 / tokens))) for _ in range(REQUESTS))
    within = tuple(max(4, length // 4) for length in tail)
    draining = f"{REQUESTS} requests, draining to 1"
    even = ((f"batch {b}", (tokens,) * b) for b in options["batches"])
    return [*even, (f"{draining} within their answers", within), (f"{draining} beyond them", tail)]


def calibrate(engine: Remote, target: Path, k: int) -> Calibration:
    """The plugin's start-up calibration, by two clocks, and one round before it that warms up."""
    repeats = 1 + CALIBRATION_ROUNDS
    prompts = workload.prompts_of(target, None, max(CALIBRATED), seed=5)
    found: dict[str, list[StepTiming]] = {clock: [] for clock in CLOCKS}
    drafts, accepted = 0, [0] * k
    for repeat in range(repeats):
        for batch in CALIBRATED:
            for width in (0, 1, 3, k):
                engine.set_k(width)
                timing = engine.run(prompts[:batch], 1.0, TOKENS)
                if repeat and timing.full:
                    context = len(prompts[0]) + TOKENS / 2
                    for clock in CLOCKS:
                        found[clock].append(
                            StepTiming(batch, width, width == 0, timing.step(clock), timing.full, context)
                        )
                if width == k:
                    drafts += timing.drafts
                    accepted = [a + b for a, b in zip(accepted, timing.per_pos, strict=True)]
        say(f"calibration: {repeat + 1} of {repeats}")
    return Calibration(found, drafts, tuple(accepted))


def measure(
    engine: Remote, target: Path, name: str, lengths: Sequence[int], options: Mapping[str, Any]
) -> list[Measured]:
    """Every k in every round, in turn."""
    rounds = options["rounds"]
    prompts = workload.prompts_of(target, None, len(lengths) * rounds, seed=99)

    def arm(k: int) -> Any:
        def run(index: int) -> Timing:
            engine.set_k(k)
            return engine.run(prompts[index * len(lengths) : (index + 1) * len(lengths)], 1.0, lengths)

        return run

    runs = interleave({str(k): arm(k) for k in options["ks"]}, rounds, 0, name)
    prompt = sum(map(len, prompts)) / len(prompts)
    out = []
    for k, timings in runs.items():
        drafts = sum(t.drafts for t in timings)
        accepted = sum(t.accepted for t in timings)
        by_position = tuple(map(sum, zip(*(t.per_pos for t in timings), strict=True)))
        seconds = {clock: [float(getattr(t.total, clock)) for t in timings] for clock in CLOCKS}
        length = 1 + accepted / max(1, drafts)
        out.append(Measured(name, int(k), tuple(lengths), prompt, seconds, length, drafts, by_position))
        say(f"{name}, k={k}: {spread(seconds['wall']).text('.2f')} s, CPU {spread(seconds['cpu']).text('.2f')} s")
    return out


if __name__ == "__main__":
    main()
