"""What stands out in a run, in words: each finding is one sentence with its steps and its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Literal

from spec_plugin.commands.report.changes import increments, nearby, shifts_of
from spec_plugin.commands.report.run import LoggedRun, Series, Spread, percent, shares_of
from spec_plugin.commands.report.states import spans_of
from spec_plugin.speculation import Reason

#: of a plain step's speed: below the first a step with drafts was slower; the others: how many, or how slow, is no accident
_SLOWER, _OFTEN, _FAR_SLOWER = 0.97, 0.1, 0.8
_A_TRY = 1.0  # predicted of a try of an unmeasured draft
Level = Literal["bad", "warn", "fine"]


@dataclass(frozen=True)
class RunFinding:
    """One thing that stands out, as a sentence with its steps and figures."""

    level: Level
    text: str
    step: int | None = None


def findings_of(run: LoggedRun) -> list[RunFinding]:
    """All of a run, the worst first, then by step."""
    found = [RunFinding("warn", remark) for remark in run.remarks]
    if not run.has_plugin:
        found.append(RunFinding("fine", "a plain run: no spec/* metric was logged, so the flag was off"))
    else:
        found += [finding for look in _LOOKS for finding in look(run)]
    return sorted(found, key=lambda f: (("bad", "warn", "fine").index(f.level), -1 if f.step is None else f.step))


def _states(run: LoggedRun) -> Iterator[RunFinding]:
    """Trouble, drafts that were slower than plain decoding, and whether it drafted at all."""
    spans, drafted = spans_of(run), run.drafted
    for span in spans:
        if span.state == "failed":
            yield RunFinding("bad", f"{span.where}: drafting had failed and was off: {span.why}", span.first)
        elif span.reason in (Reason.PAIRS_SLOWER.name, Reason.ROLLOUTS_SLOWER.name):  # the latter in older logs
            yield RunFinding("warn", f"{span.where}: drafting paused: {span.why}", span.first)
    if drafted:
        text = f"drafting began at step {drafted[0]}; {len(drafted)} of {len(run.numbers)} steps drafted"
        yield RunFinding("fine", text, drafted[0])
    elif spans and spans[-1].state == "on" and run.series("spec/acceptance_length"):
        yield RunFinding("warn", "the engines drafted, but no drafted token was ever accepted")
    elif spans and spans[-1].state in ("off", "dropped"):
        asked = spans[-1].reason == Reason.SERVE_NEVER.name
        yield RunFinding("fine" if asked else "warn", f"nothing was drafted; at the end: {spans[-1].why}")


def _said(run: LoggedRun) -> Iterator[RunFinding]:
    """What stopped the run, and what the plugin warned of, in its own words."""
    for notice in dict.fromkeys(run.notices):
        where = "" if notice.step is None else f" at step {notice.step}"
        if notice.level == "ERROR":
            yield RunFinding("bad", f"the run was stopped: {_first_line(notice.text)}", notice.step)
        elif notice.level == "WARNING":
            yield RunFinding("warn", f"the plugin warned{where}: {_first_line(notice.text)}", notice.step)


def _acceptance(run: LoggedRun) -> Iterator[RunFinding]:
    """Falls of the acceptance length while drafting, and what changed shortly before."""
    lengths = run.series("spec/acceptance_length").only(run.drafted)
    for shift in shifts_of(lengths, least=0.15, floor=1.0):
        if shift.fell:
            cause = nearby(run, shift.step)
            text = f"acceptance fell at step {shift.step}, from {shift.before:.2f} to {shift.after:.2f} tokens per forward pass"
            yield RunFinding("warn", text + (f", {cause}" if cause else ""), shift.step)


def _prediction(run: LoggedRun) -> Iterator[RunFinding]:
    """Was the controller's prediction kept, and did it pay at all."""
    predicted, realised = run.series("spec/speedup_predicted"), run.series("spec/speedup_realised").fresh()
    then = predicted.before if run.reports_late else predicted.at
    speed = Spread.of(realised.values)
    if speed is None:
        return
    text = f"speed-up of decoding, by the engine's own step times: {speed.text(unit='x')}"
    promised = [value / said for step, value in realised.pairs() if (said := then(step)) and said != _A_TRY]
    kept = Spread.of(promised)
    missed = kept is not None and kept.median < 0.8 and kept.count >= 3
    yield RunFinding("warn" if missed else "fine", text + (f"; {kept.median:.2f} of the prediction" if kept else ""))
    if slow := [step for step, value in realised.pairs() if value < _SLOWER]:
        few = len(slow) < _OFTEN * len(realised.values) and min(realised.values) >= _FAR_SLOWER
        text = f"drafting was slower than plain decoding at {_steps(slow)}"
        yield RunFinding("fine" if few else "warn", text + (f", of {len(realised.values)}" if few else ""), slow[0])


def _draft(run: LoggedRun) -> Iterator[RunFinding]:
    """Refreshes that were refused, a loss that rises, a draft that stands still."""
    for step, by in increments(run.series("spec/refresh_refused")):
        text = (
            f"the engine refused {by:.0f} refresh{'es' * (by > 1)} of the draft at step {step}; it kept the one before"
        )
        yield RunFinding("warn", text, step)
    for shift in shifts_of(run.series("spec/draft_loss"), least=0.25):
        if not shift.fell:
            text = f"the draft's loss rose at step {shift.step}, from {shift.before:.2f} to {shift.after:.2f} nats"
            yield RunFinding("warn", text, shift.step)
    still = _longest_still(run.series("spec/draft_version"), run.series("spec/train_ms").anew())
    if still and still[1] - still[0] >= 3:
        text = f"the draft was trained, but the engine kept serving one version from step {still[0]} to {still[1]}"
        yield RunFinding("warn", text, still[0])


def _log_probs(run: LoggedRun) -> Iterator[RunFinding]:
    """Differences against their bound: of text of the present policy, and of older text."""
    mean, bound, lag = (run.series(f"spec/{name}") for name in ("logprob_diff_mean", "logprob_tolerance", "policy_lag"))
    present = {s: (m, b) for s, m in mean.pairs() if (b := bound.at(s)) and not lag.at(s)}
    if over := [s for s, (m, b) in present.items() if m > b]:
        text = f"the mean log-prob difference exceeded the tolerance at {_steps(over)}"
        yield RunFinding("warn", text, over[0])
    elif present:
        worst, limit = max(present.values(), key=lambda pair: pair[0] / pair[1])
        text = f"log-probs agree: their mean difference was at most {worst:.1e} nats; the tolerance is {limit:.1e}"
        yield RunFinding("fine", text)
    if older := Spread.of([m for s, m in mean.pairs() if lag.at(s)]):
        text = f"log-probs of text from older policies: mean difference {older.text('.1e', ' nats')}"
        yield RunFinding("fine", f"{text}, judged against plain text of the same age")


def _guard(run: LoggedRun) -> Iterator[RunFinding]:
    """Alarms of plain text, and whether the log-probs were compared at all."""
    for step, by in increments(run.series("spec/logprob_alarms")):
        phases = f"{by:.0f} phase{'s' * (by > 1)} without drafts"
        text = f"{phases} failed the log-prob check at step {step}: engine and actor disagree"
        yield RunFinding("warn", text, step)
    if unproven := [s for s, v in run.series("spec/unproven").pairs() if v > 0]:
        text = (
            "the self-test could not prove that the engine samples from the log-probs that it states; see its warning"
        )
        yield RunFinding("warn", text, unproven[0])
    if unguarded := [s for s, v in run.series("spec/provenance").pairs() if v < 1]:
        text = f"the engine's log-probs were not compared with the policy's at {_steps(unguarded)}"
        yield RunFinding("bad", text, unguarded[0])
    if unknown := [s for s, v in run.series("spec/versions_known").pairs() if v < 1]:
        text = f"the trainer did not record the policy version of all sequences at {_steps(unknown)}"
        yield RunFinding("warn", text, unknown[0])


def _lag(run: LoggedRun) -> Iterator[RunFinding]:
    spread = Spread.of([v for v in run.series("spec/policy_lag").values if v > 0])
    if spread:
        yield RunFinding(
            "fine", f"asynchronous: the text in the loss was sampled {spread.text()} policy versions earlier"
        )


def _costs(run: LoggedRun) -> Iterator[RunFinding]:
    shares = shares_of(run)
    if shares:
        medians = {share.name: median(share.percent.values) for share in shares}
        text = ", ".join(f"{name} {percent(value)}" for name, value in medians.items())
        whole = percent(sum(share.whole for share in shares))
        level: Level = "warn" if sum(medians.values()) > 20 else "fine"
        yield RunFinding(level, f"share of a step's time, median: {text}; together {whole} of the run")


_LOOKS: tuple[Callable[[LoggedRun], Iterator[RunFinding]], ...] = (
    _said,
    _states,
    _acceptance,
    _prediction,
    _draft,
    _log_probs,
    _guard,
    _lag,
    _costs,
)


def _longest_still(version: Series, trained: Series) -> tuple[int, int] | None:
    """The longest stretch of one version in which draft training made steps."""
    best: tuple[int, int] | None = None
    start = None
    for i, step in enumerate(version.steps):
        moves = i == 0 or version.values[i] != version.values[i - 1] or not trained.at(step)
        start = None if moves else (start if start is not None else version.steps[i - 1])
        if start is not None and (best is None or step - start > best[1] - best[0]):
            best = (start, step)
    return best


def _steps(steps: list[int]) -> str:
    more = f" and {len(steps) - 6} more" if len(steps) > 6 else ""
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps[:6]))}{more}"


def _first_line(text: str) -> str:
    """The first line of a notice, with the next one if it announces it."""
    first, *more = text.split("\n")
    return f"{first} {more[0].strip()}" if more and first.endswith(":") else first
