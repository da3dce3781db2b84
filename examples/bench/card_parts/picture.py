"""The picture of a card: seconds of a step, and the speed of rollouts, by batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from examples.bench.card_parts.report import rows_of


def draw(found: Mapping[str, dict[str, Any]], file: Path) -> None:
    """Draw what there is of the parts ``start`` and ``rollouts``; no file where there is neither."""
    steps = rows_of(found["start"], "step") if "start" in found else []
    rollouts = rows_of(found["rollouts"], "rollouts") if "rollouts" in found else []
    if not steps and not rollouts:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.8), constrained_layout=True)
    _steps(left, steps)
    _rollouts(right, rollouts)
    some = next(iter(found.values()))
    title = some["environment"]["card"] or "a rehearsal on a CPU: no claim about any GPU"
    figure.suptitle(f"{title}, shape {some['settings']['shape']}, {some['settings']['dtype']}")
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _steps(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    for arm in dict.fromkeys(row["arm"] for row in rows):
        points = [(row["batch"], row["ms"]["median"]) for row in rows if row["arm"] == arm]
        style = {"color": "black", "lw": 2} if arm == "off" else {"ls": "--"} if arm.startswith("stock") else {}
        axes.plot(*zip(*points, strict=True), marker="o", ms=4, label=arm, **style)
    axes.set(xscale="log", yscale="log", xlabel="requests", ylabel="ms of a decoding step", title="Steps")
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    axes.set_xticks(batches, list(map(str, batches)))
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    if rows:
        axes.legend(fontsize=8)


def _rollouts(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Bars for each regime: every arm's tokens per second, the engine without the flag being 1."""
    arms = [arm for arm in rows[0]["rates"] if arm != "live"] if rows else []
    width = 0.8 / max(1, len(arms))
    for i, arm in enumerate(arms):
        heights = [row["rates"][arm]["median"] / row["rates"]["live"]["median"] for row in rows]
        places = [x + (i - (len(arms) - 1) / 2) * width for x in range(len(rows))]
        colour = "black" if arm == "controller" else plt.get_cmap("Blues")(0.25 + 0.6 * i / len(arms))
        axes.bar(places, heights, width, label=arm, color=colour)
    axes.axhline(1.0, color="gray", lw=0.8, ls=":")
    axes.set_xticks(range(len(rows)), [row["regime"].replace(", ", "\n") for row in rows], fontsize=7, rotation=30)
    axes.set(ylabel="rollout speed (without the flag: 1)", title="Rollouts")
    axes.margins(y=0.15)  # for the legend
    if rows:
        axes.legend(fontsize=8, ncols=len(arms))
