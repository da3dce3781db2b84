"""Several runs side by side: how much faster each is than the plain one, step by step, as medians with quartiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spec_plugin.commands.report.places import ReportError
from spec_plugin.commands.report.run import LoggedRun, Spread

#: what is compared; of each, smaller is faster
COMPARED = {
    "ms_per_token": "generation, per token",
    "generation_s": "generation that the trainer waits for",
    "step_s": "whole step",
}
#: of these an asynchronous run has only what training does not hide, a second or none: ratios of it say nothing
_HIDDEN = ("ms_per_token", "generation_s")


@dataclass(frozen=True)
class Comparison:
    """How one run's times relate to those of the base, step by step."""

    run: str
    base: str
    what: str
    ratio: Spread  # base over run, step by step: above 1 is faster
    first: int  # the first step that counts
    last: int

    @property
    def sentence(self) -> str:
        """The comparison in one sentence."""
        few = " (too few for quartiles: the extremes)" if self.ratio.count < 3 else ""
        steps = (
            f"at step {self.first}"
            if self.ratio.count == 1
            else f"{self.ratio.count} steps from {self.first} to {self.last}"
        )
        return f"{self.run} against {self.base}, {self.what}: {self.ratio.text(unit='x')} speed-up, {steps}{few}"


def base_of(runs: Sequence[LoggedRun], name: str | None = None) -> LoggedRun | None:
    """What the others are compared with: the run of this name, or the first plain one, or the first; of one run nothing.

    Raises:
        ReportError: if no run is called so.
    """
    if name is not None and name not in [run.name for run in runs]:
        raise ReportError(f"--base {name}: no run of this name; there are: {', '.join(run.name for run in runs)}")
    if len(runs) < 2:
        return None
    if name is not None:
        return next(run for run in runs if run.name == name)
    return next((run for run in runs if not run.has_plugin), runs[0])


def compare(runs: Sequence[LoggedRun], base: LoggedRun | None) -> list[Comparison]:
    """Each run against the base, at the steps that both have.

    Step 1 starts things up and is left out. Of a run with the plugin only what comes from its first drafted step on counts:
    before it there is nothing to compare.
    """
    found: list[Comparison] = []
    for run in runs:
        if base is None or run is base:
            continue
        start = max(2, *run.drafted[:1]) if run.drafted else 2
        hidden = run.overlaps or base.overlaps
        for name, what in COMPARED.items():
            if hidden and name in _HIDDEN:
                continue
            theirs = base.series(name)
            pairs = [(s, theirs.at(s), v) for s, v in run.series(name).pairs() if s >= start and v > 0]
            known = [(s, reference / v) for s, reference, v in pairs if reference]
            if spread := Spread.of([ratio for _, ratio in known]):
                found.append(Comparison(run.name, base.name, what, spread, known[0][0], known[-1][0]))
    return found


def caveats(runs: Sequence[LoggedRun], base: LoggedRun | None) -> list[str]:
    """Why a comparison may not be one: other trainers, other lengths, rollouts that overlap with training."""
    found = [text for run in runs if base is not None and run is not base for text in _differences(run, base)]
    if base is not None and any(run.overlaps for run in runs):
        found.append(
            "generation times of an asynchronous run are not compared: it waits only for what training does not hide"
        )
    return found


def _differences(run: LoggedRun, base: LoggedRun) -> Iterator[str]:
    if run.trainer != base.trainer:
        yield f"{run.name} is a run of {run.trainer or 'an unknown trainer'}, {base.name} of {base.trainer or 'an unknown one'}"
    mine, theirs = (Spread.of(r.series("response_tokens").values) for r in (run, base))
    if mine and theirs and abs(mine.median - theirs.median) > 0.1 * theirs.median:
        lengths = f"{mine.median:.0f} and {theirs.median:.0f} tokens"
        yield f"responses of {run.name} and {base.name} have {lengths} in the median"
