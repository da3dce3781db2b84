"""What the plugin's own work takes of a run's steps, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spec_plugin.commands.report.run import Run, Series, Spread

#: what is timed in milliseconds, and the metric that changes whenever it was done anew: others repeat the last value
WORK: Mapping[str, tuple[str, str]] = {
    "draft training": ("spec/train_ms", "spec/train_ms"),
    "refresh": ("spec/refresh_ms", "spec/refresh_ms"),
    "harvest": ("spec/harvest_ms", ""),
}
STAGES = {"generation_s": "rollouts", "logprobs_s": "log-probs", "update_s": "policy update", "sync_s": "weight sync"}


@dataclass(frozen=True)
class Share:
    """One kind of the plugin's work."""

    name: str
    percent: Series  # of each step's time
    spread: Spread  # of these
    whole: float  # percent of all steps' time together


def percent(value: float) -> str:
    """A share for people: 8.4 %, 0.3 %, 0.02 %."""
    if value >= 0.95:
        return f"{value:.1f} %"
    return f"{value:.1g} %" if value >= 0.01 else "under 0.01 %"


def shares_of(run: Run) -> list[Share]:
    """Of draft training, refresh and harvest; of those that were logged along with the step's time."""
    steps, found = run.series("step_s"), []
    for name, (metric, mark) in WORK.items():
        spent = anew(run.series(metric)) if mark else run.series(metric)
        pairs = [(s, ms, length) for s, ms in spent.pairs() if (length := steps.at(s))]
        if not pairs:
            continue
        percent = Series(tuple(s for s, _, _ in pairs), tuple(ms / length / 10 for _, ms, length in pairs))
        whole = sum(ms for _, ms, _ in pairs) / sum(length for _, _, length in pairs) / 10
        spread = Spread.of(percent.values)
        assert spread is not None
        found.append(Share(name, percent, spread, whole))
    return found


def anew(series: Series) -> Series:
    """Zero where a value only repeats the one before: nothing was done in that step."""
    done = set(series.fresh().steps)
    return Series(series.steps, tuple(value if step in done else 0.0 for step, value in series.pairs()))


def stages_of(run: Run) -> dict[str, Series]:
    """Seconds of each stage of a step, and the rest of it; stages of an asynchronous run overlap, then the rest is left out."""
    stages = {name: run.series(key) for key, name in STAGES.items() if run.series(key)}
    whole = run.series("step_s")
    if not whole or not stages:
        return stages
    rest = [v - sum(s.at(step) or 0.0 for s in stages.values()) for step, v in whole.pairs()]
    overlaps = any(left < -0.02 * all_ for left, all_ in zip(rest, whole.values, strict=True))
    return stages if overlaps else stages | {"other": Series(whole.steps, tuple(max(0.0, left) for left in rest))}
