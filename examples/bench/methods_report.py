"""What methods.py measures, as data, and its tables and picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.bench.common import Spread, show, verdict
from examples.quickstart import report as quickstart
from spec_plugin import SpecConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: of plain decoding, below which the controller must not be
PLAIN_GOAL = 0.97
Runs = Mapping[str, Sequence[quickstart.Record]]


@dataclass(frozen=True)
class Cell:
    """One method at one batch size and k."""

    method: str
    batch: int
    k: int
    acceptance_length: float  # vLLM's: of forward passes that had a draft
    tokens_per_forward: float  # of all
    speedup: Spread  # against an engine without spec-plugin whose weights can change
    against_off: Spread  # against the same engine with k=0


@dataclass(frozen=True)
class Controlled:
    """One method at one batch size under the controller, from its first phase on."""

    method: str
    batch: int
    speedup: Spread  # against an engine without spec-plugin, round by round
    whole: float  # the same of all rounds together: tries and mistakes count with what they took
    by_round: list[float]
    chosen: list[
        str
    ]  # the table of each round: k at batch size 1, at half of the batch and at all of it; ! where it was dropped
    acceptance_length: float  # vLLM's, of all rounds
    tokens_per_forward: float  # of all forward passes while k was above 0


@dataclass
class Results:
    """All that was measured, in this call or before."""

    engine: list[Cell] = field(default_factory=list)
    control: list[Controlled] = field(default_factory=list)
    run: dict[str, list[quickstart.Record]] = field(default_factory=dict)
    #: of what an earlier call measured: its date, machine and load, by part and method
    sources: dict[str, Mapping[str, Any]] = field(default_factory=dict)


def read_results(files: Sequence[Path]) -> Results:
    """What earlier calls have written; where two have measured the same method's run, the last one's."""
    out = Results()
    for file in files:
        content = json.loads(file.read_text())
        found, where = content["results"], content["environment"]
        if content["benchmark"] == "training":  # the default's run, where a model drafts for every request
            (records,) = found["runs"]["flag"]
            records = [r | {"tokens_per_forward": r["acceptance_length"]} for r in records]
            found = {"run": {SpecConfig.parse({}).method: records}}
        told = {name: where[name] for name in ("date", "cpu", "load_average", "commit")}
        cells = [Cell(**(c | {n: Spread(**c[n]) for n in ("speedup", "against_off")})) for c in found.get("engine", ())]
        steered = [Controlled(**(c | {"speedup": Spread(**c["speedup"])})) for c in found.get("control", ())]
        out.engine, out.control, out.run = out.engine + cells, out.control + steered, out.run | found.get("run", {})
        names = [f"engine {c.method}" for c in cells] + [f"control {c.method}" for c in steered]
        out.sources |= dict.fromkeys([*names, *(f"run {name}" for name in found.get("run", ()))], told)
        out.sources |= found.get("sources", {})
    return out


def report_cells(cells: Sequence[Cell]) -> None:
    """Print the engines' table."""
    rows = [
        [
            c.method,
            str(c.batch),
            str(c.k),
            f"{c.acceptance_length:.2f}",
            f"{c.tokens_per_forward:.2f}",
            c.speedup.text(".2f"),
            c.against_off.text(".2f"),
        ]
        for c in cells
    ]
    head = ["method", "batch", "k", "acceptance\nlength", "tokens per\nforward", "/ plain", "/ k=0"]
    show("Each method's engine against one without spec-plugin: medians (quartiles) of tokens per second", head, rows)


def report_controlled(found: Sequence[Controlled]) -> None:
    """Print the controller's table."""
    rows = [
        [
            c.method,
            str(c.batch),
            f"{c.acceptance_length:.2f}",
            f"{c.tokens_per_forward:.2f}",
            verdict(c.speedup.median >= PLAIN_GOAL, c.speedup.text(".2f")),
            f"{c.whole:.2f}",
            " ".join(c.chosen),
        ]
        for c in found
    ]
    head = ["method", "batch", "acceptance\nlength", "tokens per\nforward", "/ plain", "all rounds\ntogether", "chosen"]
    show(
        f"The controller against plain decoding (goal {PLAIN_GOAL}); medians (quartiles); chosen: k at batch size 1/half/all, "
        "round by round (!: dropped within the round)",
        head,
        rows,
    )


def report_runs(runs: Runs) -> None:
    """Print the runs' table."""
    names = {
        "speculating": ".0f",
        "acceptance_length": ".2f",
        "tokens_per_forward": ".2f",
        "speedup_realised": ".2f",
        "draft_training_ms": ".0f",
        "refresh_ms": ".0f",
    }
    rows = []
    for method, records in runs.items():
        rows += [
            [method, n.replace("_", " "), " ".join(quickstart.show(r[n], f) for r in records)] for n, f in names.items()
        ]
    show("The quickstart's GRPO run with each method, step by step", ["method", "what", "by step"], rows)


def write_picture(cells: Sequence[Cell], runs: Runs, file: Path) -> None:
    """Left: speed by batch size at each method's best k. Right: tokens per forward pass along the runs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12.5, 4.6), constrained_layout=True, gridspec_kw={"width_ratios": [3, 2]}
    )
    colours = _colours([*(c.method for c in cells), *runs])
    _bars(left, cells, colours)
    for method, records in runs.items():
        points = quickstart.series(records, "tokens_per_forward")
        right.plot(*points, marker="o", ms=3, label=method, color=colours[method])
    right.axhline(1.0, color="gray", lw=0.8, ls=":")
    right.set_ylim(bottom=0.9)
    right.set_xlabel("GRPO step")
    right.set_ylabel("tokens per forward pass")
    right.set_title("The quickstart's run in verl, from nothing")
    right.legend(fontsize=8)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _colours(methods: Sequence[str]) -> dict[str, Any]:
    """One colour for a method, with its memory and without."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(m.split(",")[0] for m in methods))
    return {m: plt.get_cmap("tab10")(names.index(m.split(",")[0])) for m in methods}


def _bars(axes: Axes, cells: Sequence[Cell], colours: Mapping[str, Any]) -> None:
    methods = list(dict.fromkeys(c.method for c in cells))
    batches = sorted({c.batch for c in cells})
    highest = 1.2 * max(
        c.speedup.median for c in cells
    )  # a quartile beyond is a round in which plain decoding was disturbed
    width = 0.84 / len(methods)
    for i, method in enumerate(methods):
        mine = [[c for c in cells if (c.method, c.batch) == (method, b)] for b in batches]
        tops = [max(group, key=lambda c: c.speedup.median) for group in mine]
        heights = [c.speedup.median for c in tops]
        spans = [
            [h - c.speedup.low for h, c in zip(heights, tops, strict=True)],
            [c.speedup.high - h for h, c in zip(heights, tops, strict=True)],
        ]
        places = [x + (i - (len(methods) - 1) / 2) * width for x in range(len(batches))]
        bars = axes.bar(
            places,
            heights,
            0.92 * width,
            label=method,
            yerr=spans,
            error_kw={"lw": 0.8, "ecolor": "black"},
            color=colours[method],
            hatch="//" if "," in method else None,
            edgecolor="white",
        )
        for bar, cell in zip(bars, tops, strict=True):
            place = (bar.get_x() + bar.get_width() / 2, min(cell.speedup.high, 0.94 * highest))
            style = {
                "ha": "center",
                "fontsize": 7,
                "color": "dimgray",
                "bbox": {"fc": "white", "ec": "none", "pad": 0.5},
            }
            axes.annotate(f"{cell.k}", place, (0, 3), textcoords="offset points", **style)
    axes.set_ylim(0, highest)
    axes.axhline(1.0, color="gray", lw=0.8, ls=":")
    axes.set_xticks(range(len(batches)), [f"batch {b}" for b in batches])
    axes.set_ylabel("tokens per second (plain: 1)")
    axes.set_title("An engine of each method, at its better k (the number above)")
    axes.legend(fontsize=8)
