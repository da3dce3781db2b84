"""Tables, picture and printed conclusions of learning.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.bench.common import console, show
from examples.bench.comparison import ARMS, AT_K, Replay, Served

COLOURS = {"newborn": "tab:gray", "other": "tab:orange", "own": "tab:blue"}


def report(policy: str, replays: Sequence[Replay], served: Sequence[Served], ks: Sequence[int]) -> None:
    """Print a policy's table: a row for each served arm and step, or for the first and last step where none is served."""
    cells = {(s.step, s.arm): s for s in served if s.policy == policy}
    mine = [r for r in replays if r.policy == policy]
    steps = {step for step, _ in cells} or {0, max(r.step for r in mine)}
    head = ["step, draft", *(f"replay\nk={k}" for k in ks), *(f"engine\nk={k}" for k in ks)]
    head += [*(f"speed\nk={k}" for k in ks), "controller", "its k, round by round"]
    body = []
    for replay in sorted((r for r in mine if r.step in steps), key=lambda r: r.step):
        row = [f"{replay.step}, {replay.arm}", *(f"{replay.lengths[k]:.2f}" for k in ks)]
        if cell := cells.get((replay.step, replay.arm)):
            row += [f"{cell.lengths[f'k={k}']:.2f}" for k in ks] + [f"{cell.speed[f'k={k}'].median:.2f}" for k in ks]
            row += [cell.speed["controller"].text(".2f"), " ".join(cell.chosen)]
        body.append(row)
    show(
        f"{policy}: acceptance length by replay on the step's rollouts and in the engine, and rollout speed against no drafts "
        "(medians; quartiles of the controller's). k: at batch size 1/half/all; !: dropped within the rollout",
        head,
        body,
    )


def tell(said: Mapping[str, Sequence[str]]) -> None:
    """Print the conclusions."""
    for policy, sentences in said.items():
        console.print(f"\n{policy}", style="bold")
        for sentence in sentences:
            console.print(f"- {sentence}", markup=False)


def write_picture(replays: Sequence[Replay], served: Sequence[Served], ks: Sequence[int], file: Path) -> None:
    """A column for each policy: acceptance length step by step, then for each served step bars of rollout speed by k."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    policies = list(dict.fromkeys(r.policy for r in replays))
    steps = sorted({s.step for s in served})
    heights = [1.5] + [1.0] * len(steps)
    size = (8 * len(policies), 4.2 + 2.6 * len(steps))
    figure, axes = plt.subplots(
        len(heights), len(policies), figsize=size, constrained_layout=True, squeeze=False, height_ratios=heights
    )
    top = 1.2 * max((v.median for s in served for v in s.speed.values()), default=1.0)
    for column, policy in enumerate(policies):
        _curves(axes[0][column], policy, [r for r in replays if r.policy == policy])
        for axis, step in zip(axes[1:, column], steps, strict=True):
            _bars(axis, {s.arm: s for s in served if (s.policy, s.step) == (policy, step)}, ks)
            axis.set_title(f"engine with the policy of step {step}", fontsize=10)
            axis.set_ylim(0, top)
    axes[0][0].set_ylabel(f"acceptance length, k={AT_K}")
    axes[0][0].legend(ncols=3, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    for axis in axes[1:, 0]:
        axis.set_ylabel("rollout speed (no drafts: 1)")
    if steps:
        axes[1][0].legend(ncols=len(ks) + 1, fontsize=8, loc="upper left")
    figure.savefig(file, dpi=100)
    plt.close(figure)


def _curves(axis: Any, policy: str, replays: Sequence[Replay]) -> None:
    """Replay, six lines: colour is the start, a dashed line is frozen."""
    for arm in ARMS:
        points = sorted((r.step, r.lengths[AT_K]) for r in replays if r.arm == arm.name)
        style = {"color": COLOURS[arm.start], "ls": "-" if arm.online else "--", "marker": "o", "ms": 3}
        axis.plot(*zip(*points, strict=True), label=arm.name, **style)
    axis.set_title(f"{policy}: replayed on the rollouts of each step", fontsize=11)
    axis.set_xlabel("trainer step", fontsize=9)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_ylim(0.9, AT_K + 1)
    axis.grid(alpha=0.25)


def _bars(axis: Any, cells: Mapping[str, Served], ks: Sequence[int]) -> None:
    """A group of bars for each arm that was served: each k, and the controller."""
    import matplotlib.pyplot as plt

    names, arms = [a.name for a in ARMS if a.name in cells], [*(f"k={k}" for k in ks), "controller"]
    width = 0.8 / len(arms)
    for i, arm in enumerate(arms):
        found = [cells[name].speed[arm] for name in names]
        middle = [s.median for s in found]
        error = ([s.median - s.low for s in found], [s.high - s.median for s in found])
        colour = "black" if arm == "controller" else plt.get_cmap("Blues")(0.3 + 0.6 * i / len(arms))
        places = [x + (i - (len(arms) - 1) / 2) * width for x in range(len(names))]
        axis.bar(places, middle, width, label=arm, color=colour, yerr=error, error_kw={"lw": 0.8, "ecolor": "gray"})
    axis.axhline(1.0, color="gray", lw=0.8, ls=":")
    axis.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names], fontsize=8)
