"""A run with the flag beside one without, in turns on one machine: every step of both, what they add up to, and a picture."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]  # so that this file is found by path, from anywhere

from examples.bench.turns import Contestant, Step, in_turns  # noqa: E402
from examples.quickstart import report  # noqa: E402
from examples.quickstart.trainers import Run, Trainer  # noqa: E402

KINDS = ("plain", "flag")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Sums:
    """What the turns add up to, in seconds."""

    steps: int  # of each run
    first: dict[str, float]  # the first step
    others: dict[str, float]  # all steps but the first
    whole: dict[str, float]  # all of it, start-up included
    ratio: float  # of all steps but the first, without the flag over with it, per token of the responses
    drafted_from: int | None  # the first step from which drafts were served to the end
    step: float | None  # ratio of steps' seconds per token from there on, median
    generation: float | None  # the same of generation alone
    acceptance_length: float | None  # tokens a verification from there on, mean


def run_in_turns(
    runs: Mapping[str, Run], trainer: Trainer, out: Path, each: int, say: Callable[[str], None]
) -> dict[str, list[dict[str, Any]]]:
    """Both runs to their last step; while one works the other is stopped.

    Args:
        runs: by ``KINDS``.
        trainer: of both.
        out: folder for their temporary files.
        each: steps of a turn.
        say: gets a line at what takes long.

    Returns:
        A row for each step of each run, see ``row``.

    Raises:
        TurnsError: if one of them fails.
    """
    both = [Contestant(kind, runs[kind].launch(), runs[kind].records) for kind in KINDS]
    with closing(in_turns(both, runs["flag"].steps, out.absolute(), None, say, each)) as rounds:
        for last in rounds:
            now = (f"{run.name} {show_s(row(run.steps[-1], trainer)['step_s'])}" for run in both)
            say(f"both have made step {last} of {runs['flag'].steps}: {', '.join(now)}")
    return {run.name: [row(step, trainer) for step in run.steps] for run in both}


def row(step: Step, trainer: Trainer) -> dict[str, Any]:
    """The report's numbers of a step, and ``woken``; of a step behind a stop without the time that it was stopped for."""
    found: dict[str, Any] = report.record(step.number, step.metrics, trainer)
    name = trainer.metric_names["generation_s"]
    found["generation_s"] = step.part(name) if name in step.metrics else None
    if math.isfinite(step.took_s):
        found["step_s"] = step.took_s
    return found | {"woken": step.woken, "ended_s": step.ended_s}


def sums(rows: Mapping[str, Sequence[Row]]) -> Sums:
    """Both runs side by side; steps behind a stop, which take longer, are left out of the medians."""
    flag, plain = rows["flag"], rows["plain"]
    off = [i for i, row in enumerate(flag) if not row["speculating"]]
    first = off[-1] + 1 if off else 0
    pairs = [
        (a, b)
        for i, (a, b) in enumerate(zip(plain, flag, strict=True))
        if i >= max(first, 1) and not a["woken"] and not b["woken"]
    ]

    def ratio(name: str) -> float | None:
        found = [_per_token(a, name) / _per_token(b, name) for a, b in pairs]
        return median(found) if found else None

    others = {kind: sum(row["step_s"] for row in of[1:]) for kind, of in rows.items()}
    tokens = {kind: sum(row["response_tokens"] for row in of[1:]) for kind, of in rows.items()}
    lengths = [b["acceptance_length"] for _, b in pairs]
    return Sums(
        steps=len(flag),
        first={kind: of[0]["step_s"] for kind, of in rows.items()},
        others=others,
        whole={kind: of[0]["ended_s"] + others[kind] for kind, of in rows.items()},
        ratio=others["plain"] / tokens["plain"] / (others["flag"] / tokens["flag"]) if len(flag) > 1 else math.nan,
        drafted_from=first + 1 if first < len(flag) else None,
        step=ratio("step_s"),
        generation=ratio("generation_s"),
        acceptance_length=sum(lengths) / len(lengths) if lengths else None,
    )


def _per_token(row: Row, name: str) -> float:
    return float(row[name]) / float(row["response_tokens"])


def tell(rows: Mapping[str, Sequence[Row]], found: Sums, say: Callable[[str], None]) -> None:
    """Every step of both in a line, and the sums in sentences."""
    say(
        "step    without: tokens, generation, step      with: tokens, generation, step    drafts, tokens a verification"
    )
    for a, b in zip(rows["plain"], rows["flag"], strict=True):
        two = "".join(
            f"{row['response_tokens']:>16.0f} {show_s(row['generation_s']):>9} {show_s(row['step_s']):>9}"
            for row in (a, b)
        )
        say(
            f"{b['step']:>4.0f}{two}   {'on ' if b['speculating'] else 'off'} {report.show(b['acceptance_length'], '.2f')}"
        )
    whole, first, others = found.whole, found.first, found.others
    say(
        f"The whole run with the flag {show_s(whole['flag'])}, without {show_s(whole['plain'])}: "
        f"{whole['plain'] / whole['flag']:.2f}x. First step {show_s(first['flag'])} and {show_s(first['plain'])}; the other "
        f"{found.steps - 1} {show_s(others['flag'])} and {show_s(others['plain'])}, {found.ratio:.2f}x per token."
    )
    if found.step is None or found.generation is None or found.acceptance_length is None:
        say("No step that was not woken drafted up to the end of the run.")
    else:
        say(
            f"Drafted from step {found.drafted_from} on, {found.acceptance_length:.2f} tokens a verification: generation "
            f"{found.generation:.2f}x, whole steps {found.step:.2f}x (medians, per token)."
        )


def show_s(seconds: float | None) -> str:
    """Seconds as text."""
    return report.show(seconds, ".1f") + " s"


def draw(rows: Mapping[str, Sequence[Row]], title: str, file: Path) -> None:
    """Seconds per token of generation and of whole steps, step by step, and tokens a verification."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for kind, colour, word in (("plain", "tab:gray", "without"), ("flag", "tab:blue", "with")):
        of = rows[kind][1:]
        for name, style, label in (("generation_s", "-", "generation"), ("step_s", ":", "whole step")):
            line = [1e3 * _per_token(row, name) for row in of]
            left.plot([row["step"] for row in of], line, style, color=colour, label=f"{word}, {label}")
    left.set(xlabel="GRPO step", ylabel="ms per token of the mean response", ylim=(0, None))
    left.legend(fontsize=8, frameon=False)
    right.plot([row["step"] for row in rows["flag"]], [row["acceptance_length"] for row in rows["flag"]], marker=".")
    right.set(xlabel="GRPO step", ylabel="tokens a verification")
    for axis in (left, right):
        axis.grid(alpha=0.25)
    figure.suptitle(title)
    figure.savefig(file, dpi=110)
    plt.close(figure)
