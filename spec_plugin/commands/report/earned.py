"""What the flag has earned a run in sum: the report's first line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spec_plugin.commands.report.run import LoggedRun


@dataclass(frozen=True)
class Earned:
    """Seconds of all steps together; see ``spec_plugin.ledger`` for how they are estimated."""

    saved_s: float  # generation that the trainer did not wait for
    cost_s: float  # draft training, harvest, refreshes, self-tests
    run_s: float  # what the steps took

    @property
    def net_s(self) -> float:
        """Earned less spent."""
        return self.saved_s - self.cost_s

    @property
    def sentence(self) -> str:
        """For a headline: of the time that the run would have taken without the flag, or of what it took where that was less."""
        parts = f"{duration(self.saved_s)} of generation, for {duration(self.cost_s)} of work for it"
        if self.net_s >= 0.0:
            return f"saved {duration(self.net_s)} of {duration(self.run_s + self.net_s)} ({parts})"
        return f"cost {duration(-self.net_s)} of {duration(self.run_s)} (saved {parts})"

    def as_json(self) -> dict[str, Any]:
        """JSON-ready values; docs/reference.md names the keys."""
        return {"saved_s": self.saved_s, "cost_s": self.cost_s, "net_s": self.net_s, "run_s": self.run_s}


def earned_of(run: LoggedRun) -> Earned | None:
    """None where a run did not log it, or not how long its steps took; a step of which nothing is known has saved nothing."""
    cost, saved, took = (run.series(name) for name in ("spec/cost_so_far_s", "spec/saved_so_far_s", "step_s"))
    if not cost or not took:
        return None
    # each process counts from its own start: where the sum of costs falls, a run was resumed
    last = [
        step for i, step in enumerate(cost.steps) if i + 1 == len(cost.steps) or cost.values[i + 1] < cost.values[i]
    ]
    return Earned(
        sum(saved.at(step) or 0.0 for step in last),
        sum(cost.at(step) or 0.0 for step in last),
        sum(took.values) * run.every,
    )


def duration(seconds: float) -> str:
    """For people: 3 h 12 min, 4 min 10 s, 7.3 s; of a loss with a minus."""
    if seconds < 0.0:
        return f"-{duration(-seconds)}"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"
