"""What a run of the quickstart shows: a table, a picture and a JSON file. What the trainer did not log stays empty."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from examples.quickstart.trainers import Trainer

MISSING = "–"


@dataclass(frozen=True)
class Column:
    """One number per step: its name, its heading and its format."""

    name: str
    heading: str
    format: str


COLUMNS = (
    Column("reward", "reward", ".2f"),
    Column("response_tokens", "tokens", ".1f"),
    Column("acceptance_length", "accept.\nlength", ".2f"),
    Column("draft_loss", "draft\nloss", ".2f"),
    Column("speculating", "spec.\non", ".0f"),
    Column("speedup_realised", "dec.\nx", ".2f"),
    Column("generation_s", "gener.\ns", ".2f"),
    Column("step_s", "step\ns", ".2f"),
    Column("draft_training_ms", "train\nms", ".0f"),
    Column("refresh_ms", "refresh\nms", ".0f"),
    Column("logprob_diff_mean", "log-prob\ndiff.", ".1e"),
)
SPEC_METRICS = {  # the report's name -> the plugin's; in the JSON file, some in the table and the picture
    "acceptance_length": "spec/acceptance_length",
    "tokens_per_forward": "spec/tokens_per_forward",
    "draft_loss": "spec/draft_loss",
    "speculating": "spec/on",
    "draft_training_ms": "spec/train_ms",
    "refresh_ms": "spec/refresh_ms",
    "logprob_diff_mean": "spec/logprob_diff_mean",
    "logprob_diff_max": "spec/logprob_diff_max",
    "break_even_8": "spec/break_even_b8",
    "draft_version": "spec/draft_version",
    "policy_version": "spec/policy_version",
    "engine_generation_s": "spec/generation_s",
    "harvest_ms": "spec/harvest_ms",
    "draft_train_steps": "spec/train_steps",
    "speedup_realised": "spec/speedup_realised",
    "failed": "spec/failed",
    "cost_s": "spec/cost_s",
}
OWN_METRICS = ("reward", "response_tokens", "generation_s", "step_s", "entropy", "grad_norm")  # the trainer's

Record = dict[str, float | None]


def number(metrics: Mapping[str, Any], key: str) -> float | None:
    """A finite number from the trainer's metrics, else None."""
    value = metrics.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def record(step: int, metrics: Mapping[str, Any], trainer: Trainer) -> Record:
    """The numbers of one step under the report's own names."""
    own = {name: number(metrics, trainer.metric_names.get(name, "")) for name in OWN_METRICS}
    ours = {name: number(metrics, trainer.metric_prefix + metric) for name, metric in SPEC_METRICS.items()}
    return {"step": float(step)} | own | ours


def show(value: float | None, form: str) -> str:
    """A number as text; a missing one as a dash."""
    return MISSING if value is None else format(value, form)


def series(records: Sequence[Record], name: str) -> tuple[list[float], list[float]]:
    """Steps and values of one column, without the steps where it is missing."""
    points = [(r["step"], r[name]) for r in records]
    known = [(step, value) for step, value in points if step is not None and value is not None]
    return [step for step, _ in known], [value for _, value in known]


def mean(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return sum(values) / len(values) if values else None


def table(records: Sequence[Record], title: str) -> Table:
    """One row a step. Columns without any value are left out, except the ones that the quickstart is about."""
    always = {"reward", "acceptance_length", "generation_s"}
    shown = [c for c in COLUMNS if c.name in always or series(records, c.name)[1]]
    result = Table(title=title, header_style="bold", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for heading in ("step", *(c.heading for c in shown)):
        result.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    for row in records:
        result.add_row(show(row["step"], ".0f"), *(show(row[c.name], c.format) for c in shown))
    return result


def summary(records: Sequence[Record], window: int = 5) -> dict[str, tuple[float | None, float | None]]:
    """For the main columns: their mean over the first and over the last steps."""
    window = max(1, min(window, len(records) // 2))
    names = ("reward", "acceptance_length", "draft_loss", "generation_s", "step_s")
    return {
        name: tuple(mean(series(part, name)[1]) for part in (records[:window], records[-window:]))  # type: ignore[misc]
        for name in names
    }


#: parts of a run, in the order of the bar, and how each is drawn
PARTS = {"start-up": "·", "generation": "█", "the trainer's own work": "▒", "draft work and self-tests": "░"}
_WIDE = 60  # characters of the longest bar


def parts(records: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, float]:
    """Where a run's seconds went, by the names of ``PARTS``: draft work is told apart in whatever part of a step it is done.

    Args:
        records: of its steps.
        seconds: in all, start-up included.
    """
    steps, generation, drafts = (
        sum(row[name] or 0.0 for row in records) for name in ("step_s", "generation_s", "cost_s")
    )
    found = (max(0.0, seconds - steps), generation, max(0.0, steps - generation - drafts), drafts)
    return dict(zip(PARTS, found, strict=True))


def bar(kind: str, seconds: Mapping[str, float], longest: float) -> str:
    """One stacked bar in two lines: ``seconds`` of each of ``PARTS``, to the scale at which ``longest`` fills the line."""
    drawn = "".join(sign * round(_WIDE * seconds[name] / longest) for name, sign in PARTS.items())
    words = ", ".join(f"{sign} {name} {seconds[name]:.0f} s" for name, sign in PARTS.items())
    return f"{kind:>12} {drawn} {sum(seconds.values()):.0f} s\n{'':>12} {words}"


def write_json(records: Sequence[Record], settings: Mapping[str, Any], file: Path) -> None:
    """The settings of the run and all its numbers; a missing number is null."""
    file.write_text(json.dumps({"settings": dict(settings), "steps": list(records)}, indent=1, default=str))


def write_picture(records: Sequence[Record], title: str, file: Path) -> None:
    """Draw the panels that have data, side by side, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    panels = [p for p in PANELS if any(series(records, name)[1] for name in p.lines)]
    columns = min(3, len(panels)) or 1
    rows = -(-len(panels) // columns) or 1
    figure, axes = pyplot.subplots(rows, columns, figsize=(4.6 * columns, 3.4 * rows + 0.5), squeeze=False)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax, panel in zip(axes.flat, panels, strict=False):
        panel.draw(ax, records)
        ax.set_xlabel("GRPO step")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    plain_steps = any(r["speculating"] == 0 for r in records)
    figure.suptitle(f"{title}\n(gray: steps at which speculation was off)" if plain_steps else title)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


@dataclass(frozen=True)
class Panel:
    """One plot: which numbers, what they are called, and its axis."""

    title: str
    unit: str
    lines: Mapping[str, str]  # column name -> legend
    trend: bool = False  # add the mean of five steps
    zero: bool = False  # start the axis at 0
    log: bool = False
    legend: str = "best"  # where it stands
    baseline: tuple[float, str] | None = None

    def draw(self, ax: Axes, records: Sequence[Record]) -> None:
        """Plot into ``ax``; steps without speculation are shaded."""
        for color, (name, label) in enumerate(self.lines.items()):
            steps, values = series(records, name)
            if not values:
                continue
            style = {"alpha": 0.35, "marker": "."} if self.trend else {"marker": "."}
            ax.plot(steps, values, color=f"C{color}", label=label, **style)
            if self.trend:
                ax.plot(steps, running_mean(values), color=f"C{color}", linewidth=2, label="mean of 5 steps")
        if self.baseline:
            height, text = self.baseline
            ax.axhline(height, color="gray", linestyle=":", label=text)
        for step in (r["step"] for r in records if r["speculating"] == 0):
            ax.axvspan((step or 0) - 0.5, (step or 0) + 0.5, color="gray", alpha=0.12, linewidth=0)
        ax.set_title(self.title, fontsize=11)
        ax.set_ylabel(self.unit)
        if self.log:
            ax.set_yscale("log")
        elif self.zero:
            ax.set_ylim(0, top_without_outlier([series(records, name)[1] for name in self.lines]))
        ax.legend(fontsize=8, frameon=False, loc=self.legend)


def running_mean(values: Sequence[float], window: int = 5) -> list[float]:
    """The mean of the last ``window`` values at each place."""
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i + 1 - window) : i + 1])]


def top_without_outlier(lines: Sequence[Sequence[float]]) -> float | None:
    """Where to end an axis when the first step, which starts everything up, would flatten the rest; else None."""
    later = [value for values in lines for value in values[1:]]
    first = max((values[0] for values in lines if values), default=0.0)
    return 1.3 * max(later) if later and first > 2 * max(later) else None


PANELS = (
    Panel("Reward", "share of correct sums", {"reward": "batch mean"}, trend=True, zero=True),
    Panel(
        "Acceptance length",
        "tokens per target forward",
        {"acceptance_length": "this step", "break_even_8": "break-even, 8 requests at once"},
        zero=True,
        legend="lower right",
        baseline=(1.0, "1.0 = no gain"),
    ),
    Panel("Draft loss", "nats per token", {"draft_loss": "online training"}, zero=True),
    Panel(
        "Time (the first step also starts things up)",
        "seconds",
        {"step_s": "whole step", "generation_s": "generation"},
        zero=True,
    ),
    Panel("Response length", "tokens", {"response_tokens": "batch mean"}),
    Panel(
        "Log-prob difference, engine and actor",
        "nats",
        {"logprob_diff_max": "largest", "logprob_diff_mean": "mean"},
        log=True,
    ),
)
