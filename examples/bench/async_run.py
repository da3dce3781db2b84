"""Exposed generation, step time and acceptance of a GRPO run whose rollouts lag behind, with the flag and without."""

from __future__ import annotations

import math
import statistics
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


@click.command(
    help=HELP, context_settings={"ignore_unknown_options": True, "max_content_width": 120, "show_default": True}
)
@click.option("--lags", default="0,1,2", help="Batches sampled ahead.")
@click.option("--steps", default=14, help="GRPO steps of each run.")
@click.option("--first", default=7, help="First step that counts.")
@click.option("--repeats", default=1, help="Runs of each kind.")
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of JSON and PNG.")
@click.option("--acceptance", is_flag=True, help="Compare acceptance alone.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def main(
    lags: str, steps: int, first: int, repeats: int, out: Path, acceptance: bool, overrides: tuple[str, ...]
) -> None:
    """Run, compare, report."""
    where = common.environment("cpu")
    chosen = [int(lag) for lag in lags.split(",")]
    if acceptance:
        return compare_acceptance(chosen, steps, first, repeats, out, overrides, where)
    runs: dict[tuple[int, str], list[Records]] = {}
    settings = {"lags": chosen, "steps": steps, "first": first, "repeats": repeats, "overrides": overrides}
    try:
        for repeat in range(repeats):
            for lag in chosen:
                pair = {kind: run(lag, kind, steps, out / f"async-{lag}-{kind}-{repeat}", overrides) for kind in KINDS}
                for kind, records in pair.items():
                    runs.setdefault((lag, kind), []).append(records)
    finally:  # minutes of runs are not lost to a later one that fails
        if runs:
            finish(runs, settings, where, out)


def compare_acceptance(
    lags: Sequence[int],
    steps: int,
    first: int,
    repeats: int,
    out: Path,
    overrides: tuple[str, ...],
    where: Mapping[str, Any],
) -> None:
    """Acceptance length of each lag, and how far it is from the first lag's at the same step."""
    fixed = tuple(f"{SPEC}{name}={value}" for name, value in FIXED.items())
    found: dict[int, list[list[float]]] = {lag: [] for lag in lags}
    for repeat in range(repeats):
        for lag in lags:
            records = run(lag, "flag", steps, out / f"acceptance-{lag}-{repeat}", (*fixed, *overrides))
            found[lag].append([float(r["acceptance_length"] or math.nan) for r in records])
    base = [statistics.fmean(values) for values in zip(*found[lags[0]], strict=True)]
    rows, results = [], []
    for lag, repeated in found.items():
        length = spread([value for values in repeated for value in values[first - 1 :]])
        away = spread(
            [v - b for values in repeated for v, b in zip(values[first - 1 :], base[first - 1 :], strict=True)]
        )
        rows.append([f"lag {lag}" if lag else "synchronous", length.text(".2f"), away.text("+.2f")])
        results.append({"lag": lag, "acceptance_length": length, "from_first_lag": away, "steps": repeated})
    settings = {"lags": list(lags), "steps": steps, "first": first, "repeats": repeats, "fixed": FIXED}
    head = ["", "acceptance\nlength", f"away from lag {lags[0]}\nat the same step"]
    show(f"GRPO in verl, always drafting, from step {first} on. Medians (quartiles)", head, rows)
    common.write_results("async-acceptance", settings, results, where, out)


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
