"""Exposed generation, step time and acceptance of a GRPO run whose rollouts lag behind, with the flag and without."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from spec_plugin_verl_cpu.run import SEPARATE, SPEC  # noqa: E402

from examples.bench import common  # noqa: E402
from examples.bench.common import Spread, paired, say, show, spread  # noqa: E402
from examples.quickstart import report  # noqa: E402
from examples.quickstart.policy import QUICKSTART, cached_policy  # noqa: E402
from examples.quickstart.trainers import TRAINERS, Start  # noqa: E402

HELP = """Measure what the flag does to an asynchronous GRPO run: the quickstart's in verl (separate_async), trainer and
engine in processes of their own, a core each.

\b
The lag is the number of batches that are sampled ahead: 0 is synchronous training, in which the trainer waits for all of
its rollouts; at 1 and 2 they overlap with training, and what the trainer still waits for is the *exposed* generation.
Runs without the flag and with it take turns. Steps before --first are not counted: the draft is newborn. OVERRIDES are
passed to verl, as in the quickstart.

\b
--acceptance asks one thing only: does a draft accept less because its policy lags? Runs with the flag alone, always drafting,
at one k and with the same number of draft training steps, so that nothing else differs at the same step.
"""

#: for runs that differ by their lag alone: nothing is decided by a clock
FIXED = {"serve": "always", "k": 3, "train_share": 0.5, "train_max_steps": 8}

KINDS = ("plain", "flag")
_LAG = "trainer.v1.separate_async.num_warmup_batches"
_MORE = {"policy_lag": "actor/spec/policy_lag", "sync_s": "timing_s/update_weights"}

Records = list[report.Record]


@dataclass(frozen=True)
class Cell:
    """Steps of one lag, with the flag or without."""

    lag: int
    kind: str
    exposed_s: Spread  # that the trainer waits for rollouts, a step
    step_s: Spread
    sync_s: Spread  # of it, weight sync and refresh
    acceptance_length: Spread | None
    policy_lag: Spread | None  # versions between sampling and recomputation, mean of a step's tokens


@dataclass(frozen=True)
class Arm:
    """One of several runs whose acceptance is compared step by step."""

    name: str
    lag: int
    base: str  # name of the one that it is compared with


@click.command(
    help=HELP, context_settings={"ignore_unknown_options": True, "max_content_width": 120, "show_default": True}
)
@click.option("--lags", default="0,1,2", help="Batches sampled ahead.")
@click.option("--steps", default=14, help="GRPO steps of each run.")
@click.option("--first", default=7, help="First step that counts.")
@click.option("--repeats", default=1, help="Runs of each kind.")
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of JSON and PNG.")
@click.option("--acceptance", is_flag=True, help="Compare acceptance alone, lag by lag.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def main(
    lags: str,
    steps: int,
    first: int,
    repeats: int,
    out: Path,
    acceptance: bool,
    overrides: tuple[str, ...],
) -> None:
    """Run, compare, report."""
    where = common.environment("cpu")
    chosen = [int(lag) for lag in lags.split(",")]
    settings = {"lags": chosen, "steps": steps, "first": first, "repeats": repeats, "overrides": overrides}
    if acceptance:
        return compare_acceptance(lag_arms(chosen), "async-acceptance", settings, out, where)
    runs: dict[tuple[int, str], list[Records]] = {}
    try:
        for repeat in range(repeats):
            for lag in chosen:
                pair = {kind: run(lag, kind, steps, out / f"async-{lag}-{kind}-{repeat}", overrides) for kind in KINDS}
                for kind, records in pair.items():
                    runs.setdefault((lag, kind), []).append(records)
    finally:  # minutes of runs are not lost to a later one that fails
        if runs:
            finish(runs, settings, where, out)


def lag_arms(lags: Sequence[int]) -> list[Arm]:
    """One run for each lag, compared with the first."""
    names = [f"lag {lag}" if lag else "synchronous" for lag in lags]
    return [Arm(name, lag, names[0]) for name, lag in zip(names, lags, strict=True)]


def compare_acceptance(
    arms: Sequence[Arm], name: str, settings: Mapping[str, Any], out: Path, where: Mapping[str, Any]
) -> None:
    """Acceptance length of each run, and how far it is from that of its base at the same step of the same repeat."""
    fixed = tuple(f"{SPEC}{option}={value}" for option, value in FIXED.items())
    found: dict[str, list[list[float | None]]] = {arm.name: [] for arm in arms}
    for repeat in range(int(settings["repeats"])):
        for arm in arms:
            overrides = (*fixed, *settings["overrides"])
            folder = out / f"{name}-{arm.name.replace(', ', '-').replace(' ', '-')}-{repeat}"
            records = run(arm.lag, "flag", int(settings["steps"]), folder, overrides)
            found[arm.name].append([r["acceptance_length"] for r in records])
    rows, results = [], []
    for arm in arms:
        length, away = compared(found[arm.name], found[arm.base], int(settings["first"]))
        rows.append([arm.name, length.text(".2f"), away.text("+.2f")])
        results.append({"arm": arm, "acceptance_length": length, "from_base": away, "steps": found[arm.name]})
    head = ["", "acceptance\nlength", f"away from {arms[0].base}\nat the same step"]
    if len({arm.base for arm in arms}) > 1:
        head[-1] = "away from the first of its lag\nat the same step"
    show(f"GRPO in verl, always drafting, from step {settings['first']} on. Medians (quartiles)", head, rows)
    common.write_results(name, {**settings, "fixed": FIXED}, results, where, out)


def compared(
    mine: Sequence[Sequence[float | None]], base: Sequence[Sequence[float | None]], first: int
) -> tuple[Spread, Spread]:
    """Of all repeats from this step on, where something was drafted: the values, and by how much they are above the base's."""
    pairs = [
        (a, b)
        for ours, theirs in zip(mine, base, strict=True)
        for a, b in zip(ours[first - 1 :], theirs[first - 1 :], strict=True)
        if a is not None and b is not None
    ]
    return spread([a for a, _ in pairs]), spread([a - b for a, b in pairs])


def finish(
    runs: Mapping[tuple[int, str], Sequence[Records]], settings: Mapping[str, Any], where: Mapping[str, Any], out: Path
) -> None:
    """Table, JSON and picture of the lags that were run in full."""
    first = int(settings["first"])
    cells = [
        cell(lag, kind, [r for records in found for r in records[first - 1 :]]) for (lag, kind), found in runs.items()
    ]
    tell(cells, runs, first)
    results = {"cells": cells, "runs": {f"{lag} {kind}": found for (lag, kind), found in runs.items()}}
    file = common.write_results("async", settings, results, where, out)
    write_picture(cells, runs, file.with_suffix(".png"))
    say(f"picture: {file.with_suffix('.png')}")


def run(lag: int, kind: str, steps: int, out: Path, overrides: tuple[str, ...]) -> Records:
    """One run of the quickstart."""
    trainer, settings, cache = TRAINERS["verl"], QUICKSTART, ROOT / ".cache" / "quickstart"
    plain = kind == "plain"
    chosen = (*SEPARATE, f"{_LAG}={lag}", *(o for o in overrides if not (plain and "spec." in o)))
    policy = cached_policy(cache, settings)
    start = Start(policy, cache / f"data-{settings.digest}", settings, out.absolute(), steps, plain, chosen)
    say(f"lag {lag}, {kind}: {steps} steps")
    records = []
    for step, metrics in trainer.run(start).follow():
        more = {name: report.number(metrics, theirs) for name, theirs in _MORE.items()}
        records.append(report.record(step, metrics, trainer) | more)
    return records


def cell(lag: int, kind: str, records: Sequence[report.Record]) -> Cell:
    """What the steps that count have in common."""

    def of(name: str) -> Spread | None:
        values = [value for r in records if (value := r[name]) is not None]
        return spread(values) if values else None

    exposed, step, sync = of("generation_s"), of("step_s"), of("sync_s")
    assert exposed is not None and step is not None and sync is not None
    return Cell(lag, kind, exposed, step, sync, of("acceptance_length"), of("policy_lag"))


def gains(runs: Mapping[tuple[int, str], Sequence[Records]], lag: int, first: int, name: str) -> Spread:
    """How many times as long the same steps take without the flag."""

    def values(kind: str) -> list[float]:
        return [float(r[name] or 0.0) for records in runs[lag, kind] for r in records[first - 1 :]]

    return paired(values("plain"), values("flag"))


def tell(cells: Sequence[Cell], runs: Mapping[tuple[int, str], Sequence[Records]], first: int) -> None:
    """Print the table."""
    rows = []
    for c in cells:
        flag = c.kind == "flag"
        rows.append(
            [
                "synchronous" if c.lag == 0 else f"lag {c.lag}",
                c.kind,
                c.exposed_s.text(".2f"),
                c.step_s.text(".2f"),
                c.sync_s.text(".2f"),
                c.acceptance_length.text(".2f") if c.acceptance_length else "",
                c.policy_lag.text(".2f") if c.policy_lag else "",
                gains(runs, c.lag, first, "step_s").text(".2f") if flag else "",
            ]
        )
    head = [
        "",
        "",
        "exposed\ngeneration, s",
        "step, s",
        "weight sync\nand refresh, s",
        "acceptance\nlength",
        "policy\nlag",
    ]
    head.append("step\nspeed-up")
    show(f"GRPO in verl, from step {first} on. Medians (quartiles)", head, rows)


def write_picture(cells: Sequence[Cell], runs: Mapping[tuple[int, str], Sequence[Records]], file: Path) -> None:
    """Step time with its exposed part, and acceptance step by step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (bars, lines) = plt.subplots(1, 2, figsize=(11, 3.8), constrained_layout=True)
    names = ["sync" if c.lag == 0 else f"lag {c.lag}" for c in cells if c.kind == "plain"]
    for offset, (kind, colour) in zip((-0.2, 0.2), zip(KINDS, ("tab:gray", "tab:blue"), strict=True), strict=True):
        mine = [c for c in cells if c.kind == kind]
        places = [i + offset for i in range(len(mine))]
        rest = [c.step_s.median - c.exposed_s.median for c in mine]
        bars.bar(places, rest, 0.36, color=colour, alpha=0.35, label=f"{kind}: training and sync")
        exposed = [c.exposed_s.median for c in mine]
        bars.bar(places, exposed, 0.36, bottom=rest, color=colour, label=f"{kind}: exposed generation")
    bars.set_xticks(range(len(names)), names)
    bars.set_ylabel("seconds a step")
    bars.legend(fontsize=8)
    for (lag, kind), found in runs.items():
        if kind == "flag":
            for i, records in enumerate(found):
                steps, values = report.series(records, "acceptance_length")
                lines.plot(steps, values, label=(("sync" if lag == 0 else f"lag {lag}") if i == 0 else None), lw=1.5)
    lines.set_xlabel("GRPO step")
    lines.set_ylabel("tokens per target forward")
    lines.legend(fontsize=8)
    for axis in (bars, lines):
        axis.grid(alpha=0.25)
    figure.suptitle("Asynchronous GRPO in verl, with the flag and without")
    figure.savefig(file, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
