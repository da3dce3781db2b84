"""What stands out in a run, in words: each finding is one sentence with its steps and its figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from spec_plugin.api.speculation import Reason
from spec_plugin.commands.report.changes import increments, nearby, shifts_of
from spec_plugin.commands.report.run import LoggedRun, Spread, duration, earned_of, work_of
from spec_plugin.commands.report.states import spans_of

#: of a plain step's speed: below the first a step with drafts was slower; the others: how many, or how slow, is no accident
_SLOWER, _OFTEN, _FAR_SLOWER = 0.97, 0.1, 0.8
_A_TRY = 1.0  # predicted of a try of an unmeasured draft
_DEAR = 0.2  # of a usual step's time, for the plugin's own work
Level = Literal["bad", "warn", "fine"]
#: a metric, between which bounds it is as it should be, and what is said if it is not
_BOUNDS: tuple[tuple[Level, str, float, float, str], ...] = (
    ("warn", "unproven", 0, 0, "the self-test could not prove all of what it asks; its warning in the log says what"),
    ("bad", "provenance", 1, 1, "the engine's log-probs were not compared with the policy's at {}"),
    ("warn", "versions_known", 1, 1, "the trainer did not record the policy version of all sequences at {}"),
    ("bad", "exactness", -9e9, 3, "by 1000 to 1 the run's own text is not what the policy would sample, at {}"),
)


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
    """Trouble, and whether it drafted at all."""
    spans, drafted = spans_of(run), run.drafted
    for span in spans:
        if span.state == "failed":
            yield RunFinding("bad", f"{span.where}: drafting had failed and was off: {span.why}", span.first)
    if drafted:
        text = f"drafting began at step {drafted[0]}; {len(drafted)} of {len(run.numbers)} steps drafted"
        yield RunFinding("fine", text, drafted[0])
    elif spans and spans[-1].state == "on" and run.series("spec/acceptance_length"):
        yield RunFinding("warn", "the engines drafted, but no drafted token was ever accepted")
    elif spans and spans[-1].state in ("off", "dropped"):
        asked = spans[-1].reason == Reason.SERVE_NEVER.name
        yield RunFinding("fine" if asked else "warn", f"nothing was drafted; at the end: {spans[-1].why}")


def _acceptance(run: LoggedRun) -> Iterator[RunFinding]:
    """Falls of the acceptance length while drafting, and what changed shortly before."""
    for shift in shifts_of(run.series("spec/acceptance_length").only(run.drafted), least=0.15, floor=1.0):
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
    kept = Spread.of([v / said for step, v in realised.pairs() if (said := then(step)) and said != _A_TRY])
    missed = kept is not None and kept.median < 0.8 and kept.count >= 3
    yield RunFinding("warn" if missed else "fine", text + (f"; {kept.median:.2f} of the prediction" if kept else ""))
    if slow := [step for step, value in realised.pairs() if value < _SLOWER]:
        few = len(slow) < _OFTEN * len(realised.values) and min(realised.values) >= _FAR_SLOWER
        text = f"drafting was slower than plain decoding at {_steps(slow)}"
        yield RunFinding("fine" if few else "warn", text + (f", of {len(realised.values)}" if few else ""), slow[0])


def _draft(run: LoggedRun) -> Iterator[RunFinding]:
    """Refreshes that were refused, training that comes to nothing, a loss that rises, a draft that stands still."""
    for step, by in increments(run.series("spec/refresh_refused")):
        text = (
            f"the engine refused {by:.0f} refresh{'es' * (by > 1)} of the draft at step {step}; it kept the one before"
        )
        yield RunFinding("warn", text, step)
    if run.series("spec/train_steps") and not run.trained:
        text = "draft training got time, and its optimizer made no optimizer step: a larger train_share gives it more"
        yield RunFinding("warn", text)
    for shift in shifts_of(run.draft_loss, least=0.25):
        if not shift.fell:
            text = f"the draft's loss rose at step {shift.step}, from {shift.before:.2f} to {shift.after:.2f} nats"
            yield RunFinding("warn", text, shift.step)
    first, last = _longest_still(run)
    if last - first >= 3:
        text = f"the draft was trained, but the engine kept serving one version from step {first} to {last}"
        yield RunFinding("warn", text, first)


def _longest_still(run: LoggedRun) -> tuple[int, int]:
    """The longest stretch of one version of the draft in whose every step it was trained."""
    version, best, start = run.series("spec/draft_version"), (0, 0), None
    for i, step in enumerate(version.steps):
        moves = i == 0 or version.values[i] != version.values[i - 1] or step not in run.trained
        start = None if moves else (start if start is not None else version.steps[i - 1])
        if start is not None and step - start > best[1] - best[0]:
            best = (start, step)
    return best


def _log_probs(run: LoggedRun) -> Iterator[RunFinding]:
    """Differences against their bound: of text of the present policy, and of older text."""
    mean, bound, lag = (run.series(f"spec/{name}") for name in ("logprob_diff_mean", "logprob_tolerance", "policy_lag"))
    present = {s: (m, b) for s, m in mean.pairs() if (b := bound.at(s)) and not lag.at(s)}
    if over := [s for s, (m, b) in present.items() if m > b]:
        yield RunFinding("warn", f"the mean log-prob difference exceeded the tolerance at {_steps(over)}", over[0])
    elif present:
        worst, limit = max(present.values(), key=lambda pair: pair[0] / pair[1])
        text = f"log-probs agree: their mean difference was at most {worst:.1e} nats; the tolerance is {limit:.1e}"
        yield RunFinding("fine", text)
    if behind := Spread.of([v for v in lag.values if v > 0]):
        text = f"asynchronous: the text in the loss was sampled {behind.text()} policy versions earlier"
        yield RunFinding("fine", f"{text}; its log-probs are judged against plain text of the same age")


def _guard(run: LoggedRun) -> Iterator[RunFinding]:
    """Alarms of plain text, and whether the log-probs were compared at all."""
    for step, by in increments(run.series("spec/logprob_alarms")):
        phases = f"{by:.0f} phase{'s' * (by > 1)} without drafts"
        text = f"{phases} failed the log-prob check at step {step}: engine and actor disagree"
        yield RunFinding("warn", text, step)
    for level, name, low, high, text in _BOUNDS:
        if steps := [s for s, v in run.series(f"spec/{name}").pairs() if not low <= v <= high]:
            yield RunFinding(level, text.format(_steps(steps)), steps[0])


def _costs(run: LoggedRun) -> Iterator[RunFinding]:
    """What the plugin's own work took, in the same seconds as the headline."""
    if (earned := earned_of(run)) is None or not earned.run_s:
        return
    took, work = run.series("step_s"), work_of(run)
    parts = {name: run.every * sum(spent.values) for name, spent in work.items()}
    parts["self-tests and the rest"] = max(0.0, earned.cost_s - sum(parts.values()))
    usual = [median(v / s for step, v in spent.pairs() if (s := took.at(step))) for spent in work.values()]
    whole = f"{duration(earned.cost_s)}, {100 * earned.cost_s / earned.run_s:.2g} % of the steps' time"
    text = ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts.items())
    yield RunFinding("warn" if sum(usual) > _DEAR else "fine", f"the flag's own work took {whole}: {text}")


_LOOKS = (_states, _acceptance, _prediction, _draft, _log_probs, _guard, _costs)


def _steps(steps: Sequence[int]) -> str:
    more = f" and {len(steps) - 6} more" if len(steps) > 6 else ""
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps[:6]))}{more}"
