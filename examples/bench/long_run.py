"""A GRPO run with the flag beside one without, step by step in turn: rewards, seconds, what was saved, a kill in the middle."""

from __future__ import annotations

import math
import shutil
import statistics
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from spec_plugin_conformance.launch import Launch  # noqa: E402
from spec_plugin_verl_cpu.run import SPEC  # noqa: E402

from examples.bench import common  # noqa: E402
from examples.bench.common import Spread, say, show, spread  # noqa: E402
from examples.bench.turns import BusyLoop, Contestant, Step, in_turns  # noqa: E402
from examples.quickstart.policy import QUICKSTART, cached_policy  # noqa: E402
from examples.quickstart.trainers import TRAINERS, Start, Trainer  # noqa: E402
from spec_plugin.api.config import SpecConfig  # noqa: E402

HELP = """Compare whole steps of the quickstart's GRPO run, with the flag and without, and the rewards that come of it.

\b
Both runs live side by side and take turns of --each steps: while one works the other one is stopped, so what else the
machine does meets both. Steps are compared by their number, per token of the response; the first one behind a stop is left out:
a run that wakes takes longer for it, and trains its draft half as long again. --kill-at ends the run with the flag behind that
step and lets it go on from its last checkpoint. --busy 30 30 runs a loop beside them that comes and goes. OVERRIDES are passed to
the trainer, as in the quickstart.

\b
With --each 1 every step is one behind a stop: none is left out, and since draft training is a share of a clock that goes on
while a run is stopped, train_share is halved. Rewards are called equivalent if the 90 % confidence interval of their mean
difference, from means of ten steps each, lies within --margin (two one-sided tests at 5 %): of all steps, and of the second half
alone, where runs that part would have parted. It is one run of each kind, whose tens are not independent: it can show that they
part, and not that they never would.
"""

TEN = 10
#: of our metrics, those that a reader of the results follows from step to step
SHOWN = (
    "on",
    "acceptance_length",
    "k_b1",
    "k_b8",
    "train_ms",
    "saved_s",
    "cost_s",
    "net_s",
    "net_so_far_s",
    "speedup_realised",
)


@dataclass(frozen=True)
class Equivalence:
    """Reward with the flag less reward without, from means of ten steps each."""

    difference: float
    low: float  # of the 90 % confidence interval
    high: float
    blocks: int
    margin: float

    @property
    def holds(self) -> bool:
        """Is a difference of the margin ruled out on both sides."""
        return -self.margin < self.low and self.high < self.margin


@dataclass(frozen=True)
class Found:
    """What a pair of runs shows, from a step on."""

    first_step: int
    drafted: int  # steps from the first on that drafted
    counted: int  # of so many
    generation: Spread  # speed-up per response token, step by step
    step: Spread
    whole: float  # seconds of all steps without the flag over those with it, start-up left out
    measured_saved_s: float  # by which the steps with the flag took less in all, at equal tokens
    reported_net_s: float | None  # what the run itself says of that
    rewards: dict[str, list[float]]  # means of ten steps
    equivalence: Equivalence | None  # None: fewer than two tens
    second_half: Equivalence | None
    memory_gb: dict[str, float]  # most of each


@click.command(
    help=HELP, context_settings={"ignore_unknown_options": True, "max_content_width": 120, "show_default": True}
)
@click.option("--trainer", "name", default="verl", type=click.Choice(list(TRAINERS)), help="Which one.")
@click.option("--steps", default=100, type=click.IntRange(2), help="GRPO steps of each run.")
@click.option("--first", default=5, type=click.IntRange(1), help="First step whose times are compared.")
@click.option("--prompts", default=1024, type=click.IntRange(12), help="Different ones; 12 as in the quickstart.")
@click.option("--kill-at", type=click.IntRange(1), help="Kill the run with the flag behind this step.")
@click.option("--each", default=4, type=click.IntRange(1), help="Steps of a turn; 1, or 3 and more.")
@click.option("--busy", nargs=2, type=float, help="Seconds on and off of a loop beside the runs.")
@click.option("--margin", default=0.05, help="Difference of rewards that would matter.")
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of JSON and PNG.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def main(
    name: str,
    steps: int,
    first: int,
    prompts: int,
    kill_at: int | None,
    each: int,
    busy: tuple[float, float] | None,
    margin: float,
    out: Path,
    overrides: tuple[str, ...],
) -> None:
    """Run, compare, report."""
    if each == 2:
        raise click.BadParameter(
            "of two steps one is behind a stop: what is usual can't be told from that", param_hint="--each"
        )
    if steps < first + each:
        raise click.BadParameter(f"nothing is left to compare from step {first} on", param_hint="--steps")
    where, trainer = common.environment("cpu"), TRAINERS[name]
    folder = (out / f"long-run-{name}").absolute()
    shutil.rmtree(folder, ignore_errors=True)  # a trainer would go on from the checkpoints of another time
    chosen = overrides if each > 1 else (*half_the_share(trainer, overrides), *overrides)
    runs = [contestant(trainer, kind, steps, prompts, folder / kind, kill_at, chosen) for kind in ("plain", "flag")]
    with closing(in_turns(runs, steps, folder, kill_at, say, each)) as rounds:
        beside = BusyLoop(*busy) if busy else None
        try:
            for number in rounds:
                if number % TEN < each or number == steps:
                    say(f"step {number} of {steps}")
        finally:
            if beside is not None:
                beside.end()
    found = compare(trainer, runs[0], runs[1], first, margin, woken=each == 1)
    tell(trainer, found)
    settings = {
        "trainer": name,
        "steps": steps,
        "prompts": prompts,
        "kill_at": kill_at,
        "each": each,
        "busy": busy,
        "overrides": overrides,
    }
    logged = {run.name: [kept(trainer, step) for step in run.steps] for run in runs}
    file = common.write_results("long-run", settings, {"found": found, "runs": logged}, where, out)
    write_picture(trainer, runs, file.with_suffix(".png"))
    say(f"picture: {file.with_suffix('.png')}")


def contestant(
    trainer: Trainer, kind: str, steps: int, prompts: int, out: Path, kill_at: int | None, overrides: tuple[str, ...]
) -> Contestant:
    """One of the two runs; that with the flag saves a checkpoint two steps before it is killed."""
    cache, plain = ROOT / ".cache" / "quickstart", kind == "plain"
    policy = cached_policy(cache, QUICKSTART)
    chosen = without_ours(overrides) if plain else overrides
    data = cache / f"data-{QUICKSTART.digest}-{prompts}"

    def launched(*more: str) -> Launch:
        run = trainer.run(Start(policy, data, QUICKSTART, out, steps, plain, (*more, *chosen), prompts))
        return replace(run.launch(), interpreter=None)  # a fork server's processes would be of both runs

    records = trainer.run(Start(policy, data, QUICKSTART, out, steps, plain, chosen, prompts)).records
    if kill_at is None or plain:
        return Contestant(kind, launched(), records)
    every = str(max(1, kill_at - 2))
    if trainer.name == "verl":  # which goes on from a checkpoint that it finds
        return Contestant(kind, launched(f"trainer.save_freq={every}"), records, launched("trainer.save_freq=-1"))
    saves = ("--ckpt.save_steps", every)
    return Contestant(kind, launched(*saves), records, launched("--ckpt.load_enable"))


def without_ours(overrides: Sequence[str]) -> tuple[str, ...]:
    """Less the plugin's own options, of verl (one word) and OpenRLHF (a flag and its value)."""
    kept: list[str] = []
    dropped = False
    for word in overrides:
        dropped = "spec." in word if "spec." in word or word.startswith("-") or "=" in word else dropped
        if not dropped:
            kept.append(word)
    return tuple(kept)


def half_the_share(trainer: Trainer, overrides: Sequence[str]) -> list[str]:
    """Draft training is bounded by a clock that goes on while the run is stopped for about as long as it works."""
    if any("train_share" in word for word in overrides):
        return []
    share = SpecConfig().train_share / 2
    return [f"{SPEC}train_share={share}"] if trainer.name == "verl" else ["--spec.train_share", str(share)]


def kept(trainer: Trainer, step: Step) -> Step:
    """What the comparison and the picture read, to six digits: a trainer logs a hundred numbers more in each step."""
    names = {*trainer.metric_names.values(), *(f"{trainer.metric_prefix}spec/{name}" for name in SHOWN)}
    metrics = {name: float(f"{value:.6g}") for name, value in step.metrics.items() if name in names}
    return replace(step, metrics=metrics)


def compare(
    trainer: Trainer, plain: Contestant, flag: Contestant, first: int, margin: float, woken: bool = False
) -> Found:
    """Steps of the same number, from ``first`` on; ``woken``: those behind a stop, too."""
    names = trainer.metric_names
    both = [(a, b) for a, b in zip(plain.steps, flag.steps, strict=True) if a.number >= first]
    # behind a kill there is a start-up, which is no step
    pairs = [(a, b) for a, b in both if not math.isnan(a.took_s + b.took_s) and (woken or not (a.woken or b.woken))]

    def per_token(seconds: float, step: Step) -> float:
        return seconds / step.metrics[names["response_tokens"]]

    generation = names["generation_s"]
    generations = [per_token(a.part(generation), a) / per_token(b.part(generation), b) for a, b in pairs]
    steps = [per_token(a.took_s, a) / per_token(b.took_s, b) for a, b in pairs]
    tokens = [b.metrics[names["response_tokens"]] / a.metrics[names["response_tokens"]] for a, b in pairs]
    without = sum(a.took_s * ratio for (a, _), ratio in zip(pairs, tokens, strict=True))
    took = sum(b.took_s for _, b in pairs)
    own = [b.metrics.get(f"{trainer.metric_prefix}spec/net_s") for _, b in pairs]
    known = [value for value in own if value is not None]
    rewards = {run.name: [step.metrics[names["reward"]] for step in run.steps] for run in (plain, flag)}
    tens = {
        kind: [statistics.fmean(v[i : i + TEN]) for i in range(0, len(v) - TEN + 1, TEN)] for kind, v in rewards.items()
    }
    return Found(
        first_step=first,
        drafted=sum(b.metrics.get(f"{trainer.metric_prefix}spec/on", 0.0) > 0 for _, b in pairs),
        counted=len(pairs),
        generation=spread(generations),
        step=spread(steps),
        whole=without / took,
        measured_saved_s=without - took,
        reported_net_s=sum(known) if known else None,
        rewards=tens,
        equivalence=equivalence(tens["flag"], tens["plain"], margin),
        second_half=equivalence(*(tens[kind][len(tens[kind]) // 2 :] for kind in ("flag", "plain")), margin),
        memory_gb={run.name: run.memory_gb for run in (plain, flag)},
    )


def equivalence(a: list[float], b: list[float], margin: float) -> Equivalence | None:
    """Two one-sided paired t-tests at 5 % (Schuirmann, J. Pharmacokinet. Biopharm. 15, 1987), as a confidence interval."""
    from scipy import stats

    differences = [x - y for x, y in zip(a, b, strict=True)]
    if len(differences) < 2:
        return None
    middle = statistics.fmean(differences)
    reach = float(stats.t.ppf(0.95, len(differences) - 1)) * statistics.stdev(differences) / len(differences) ** 0.5
    return Equivalence(middle, middle - reach, middle + reach, len(differences), margin)


def tell(trainer: Trainer, found: Found) -> None:
    """Print the comparison."""
    reported = "–" if found.reported_net_s is None else f"{found.reported_net_s:.0f}"
    row = [
        f"from {found.first_step}: {found.drafted} of {found.counted} drafted",
        found.generation.text(".2f"),
        found.step.text(".2f"),
        f"{found.whole:.2f}",
        f"{found.measured_saved_s:.0f} / {reported}",
        " / ".join(f"{found.memory_gb[kind]:.1f}" for kind in ("flag", "plain")),
    ]
    head = [
        "steps",
        "generation\nspeed-up",
        "step\nspeed-up",
        "all steps",
        "saved s, measured\n/ as reported",
        "GB with\n/ without",
    ]
    title = f"GRPO in {trainer.name}: with the flag against without, in turns, per response token. Medians (quartiles)"
    show(title, head, [row])
    for kind, tens in found.rewards.items():
        say(f"reward by tens of steps, {kind:<5}: {' '.join(f'{r:.2f}' for r in tens)}")
    for steps, e in (("all steps", found.equivalence), ("the second half", found.second_half)):
        if e is not None:
            verdict = "equivalent" if e.holds else "not shown to be equivalent"
            say(
                f"reward with less without, {steps}: {e.difference:+.3f}, 90 % interval {e.low:+.3f} to {e.high:+.3f} from "
                f"{e.blocks} tens: {verdict} within {e.margin:g}"
            )


def write_picture(trainer: Trainer, runs: list[Contestant], file: Path) -> None:
    """Reward, acceptance, step time and what was saved, step by step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names, prefix = trainer.metric_names, trainer.metric_prefix
    panels: dict[str, Any] = {
        "reward (mean of five steps)": lambda s: s.metrics.get(names["reward"]),
        "tokens per target forward": lambda s: s.metrics.get(f"{prefix}spec/acceptance_length"),
        "whole step, s": lambda s: None if math.isnan(s.took_s) else s.took_s,
        "net saved, s, as reported": lambda s: s.metrics.get(f"{prefix}spec/net_so_far_s"),
    }
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.6), constrained_layout=True)
    for axis, (label, of) in zip(axes, panels.items(), strict=True):
        for run, colour in zip(runs, ("tab:gray", "tab:blue"), strict=True):
            points = [(s.number, value) for s in run.steps if (value := of(s)) is not None]
            if label.startswith("reward"):
                points = [
                    (n, statistics.fmean(v for _, v in points[max(0, i - 4) : i + 1]))
                    for i, (n, _) in enumerate(points)
                ]
            if points:
                axis.plot(*zip(*points, strict=True), color=colour, label=run.name, lw=1.4, alpha=0.85)
        axis.set_xlabel("GRPO step")
        axis.set_title(label, fontsize=10)
        axis.grid(alpha=0.25)
    axes[0].legend()
    figure.suptitle(f"GRPO in {trainer.name}, with the flag and without, in turns")
    figure.savefig(file, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
