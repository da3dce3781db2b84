"""What stands out in a run, in words: each finding is one sentence with its steps and its figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from operator import itemgetter
from statistics import median
from typing import Literal

import numpy as np

from spec_plugin.api.speculation import Reason
from spec_plugin.commands.report.run import LoggedRun, Spread, duration, fresh, only
from spec_plugin.commands.report.states import spans_of

#: of a plain step's speed, below which a step with drafts was slower, and of the drafted steps, of which so many are no accident
_SLOWER, _OFTEN = 0.97, 0.1
#: drafted steps from which on acceptance is judged, by so many parts of them, and what has fallen of what it is above 1
_MANY, _PARTS, _FALLEN = 30, 5, 0.7
_A_TRY = 1.0  # predicted of a try of an unmeasured draft
_DEAR = 0.2  # of a usual step's time, for the plugin's own work
_SHOWN_S = 0.05  # of one kind of work
_STANDS_STILL = 3  # times that a draft is trained while the engine goes on with one version
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


def _resumed(run: LoggedRun) -> Iterator[RunFinding]:
    """Steps without drafts behind a resume, where there had been some before."""
    for start in run.resumed:
        again = next((step for step in run.drafted if step >= start), None)
        if any(step < start for step in run.drafted) and again != start:
            plain = [step for step in run.numbers if start <= step and (again is None or step < again)]
            why = next(
                (span.why for span in spans_of(run) if span.first <= start <= span.last), "the log does not say why"
            )
            yield RunFinding(
                "warn", f"the run was resumed at step {start}, and did not draft at {_steps(plain)}: {why}", start
            )


def _acceptance(run: LoggedRun) -> Iterator[RunFinding]:
    """Is the acceptance length of the last drafted steps far below what it was in as many others."""
    lengths = [*only(run.series("spec/acceptance_length"), run.drafted).values()]
    if len(lengths) >= _MANY:
        medians = [median(part.tolist()) for part in np.array_split(lengths, _PARTS)]
        if medians[-1] - 1.0 < _FALLEN * (max(medians) - 1.0):
            text = f"acceptance fell: {max(medians):.2f} tokens per forward pass in the best fifth of the drafted steps"
            yield RunFinding("warn", f"{text}, {medians[-1]:.2f} in the last")


def _speed(run: LoggedRun) -> Iterator[RunFinding]:
    """Did drafting pay, and as much as the controller had predicted; an asynchronous run logs what came of it a step later."""
    realised, predicted = fresh(run.series("spec/speedup_realised")), run.series("spec/speedup_predicted")
    if (speed := Spread.of(realised.values())) is None:
        return
    paired = [] if run.overlaps else [(speedup, predicted.get(step, _A_TRY)) for step, speedup in realised.items()]
    kept = Spread.of(speedup / promised for speedup, promised in paired if promised != _A_TRY)
    text = f"speed-up of decoding, by the engine's own step times: {speed.text(unit='x')}"
    missed = kept is not None and kept.median < 0.8 and kept.count >= 3
    yield RunFinding("warn" if missed else "fine", text + (f"; {kept.median:.2f} of the prediction" if kept else ""))
    if slow := [step for step, speedup in realised.items() if speedup < _SLOWER]:
        text = f"drafting was slower than plain decoding at {_steps(slow)}, of {len(realised)}"
        yield RunFinding("warn" if len(slow) >= _OFTEN * len(realised) else "fine", text, slow[0])


def _draft(run: LoggedRun) -> Iterator[RunFinding]:
    """Refreshes that were refused, training that comes to nothing, a draft that stands still."""
    if refused := {s: n for s, n in run.series("spec/refresh_refused").items() if n}:
        text = f"refreshes that the engine refused: {max(refused.values()):.0f}, the first at step {min(refused)}"
        yield RunFinding("warn", f"{text}; it kept the draft before", min(refused))
    if run.series("spec/train_steps") and any(run.series("spec/train_ms").values()) and not run.trained:
        text = "draft training got time, and its optimizer made no optimizer step: a larger train_share gives it more"
        yield RunFinding("warn", text)
    in_these = set(run.trained)
    for _, same in groupby(run.series("spec/draft_version").items(), itemgetter(1)):
        _, *later = [step for step, _ in same]
        if len(trained := sorted(in_these.intersection(later))) >= _STANDS_STILL:
            text = f"the draft was trained at {_steps(trained)}, but the engine kept serving one version"
            yield RunFinding("warn", text, trained[0])


def _log_probs(run: LoggedRun) -> Iterator[RunFinding]:
    """Differences against their bound: of text of the present policy, and of older text."""
    mean, bound, lag = (run.series(f"spec/{name}") for name in ("logprob_diff_mean", "logprob_tolerance", "policy_lag"))
    present = {s: (m, b) for s, m in mean.items() if (b := bound.get(s)) and not lag.get(s)}
    if over := [s for s, (m, b) in present.items() if m > b]:
        yield RunFinding("warn", f"the mean log-prob difference exceeded the tolerance at {_steps(over)}", over[0])
    elif present:
        worst, limit = max(present.values(), key=lambda pair: pair[0] / pair[1])
        text = f"log-probs agree: their mean difference was at most {worst:.1e} nats; the tolerance is {limit:.1e}"
        yield RunFinding("fine", text)
    if behind := Spread.of(v for v in lag.values() if v > 0):
        text = f"asynchronous: the text in the loss was sampled {behind.text()} policy versions earlier"
        yield RunFinding("fine", f"{text}; its log-probs are judged against plain text of the same age")


def _guard(run: LoggedRun) -> Iterator[RunFinding]:
    """Alarms of plain text, and whether the log-probs were compared at all."""
    if alarms := {s: n for s, n in run.series("spec/logprob_alarms").items() if n}:
        text = f"phases without drafts that failed the log-prob check: {max(alarms.values()):.0f}"
        yield RunFinding("warn", f"{text}, the first at step {min(alarms)}: engine and actor disagree", min(alarms))
    for level, name, low, high, text in _BOUNDS:
        if steps := [s for s, v in run.series(f"spec/{name}").items() if not low <= v <= high]:
            yield RunFinding(level, text.format(_steps(steps)), steps[0])


def _costs(run: LoggedRun) -> Iterator[RunFinding]:
    """What the plugin's own work took, in the same seconds as the headline, and from which step on drafting has paid for it."""
    if (earned := run.earned) is None or not earned.run_s:
        return
    took, work, (saved, cost) = run.series("step_s"), run.work, run.sums_so_far
    parts = {name: run.every * sum(spent.values()) for name, spent in work.items()}
    if run.self_tests:
        parts[f"self-tests ({_steps([*run.self_tests])})"] = sum(run.self_tests.values())
    parts["the rest"] = max(0.0, earned.cost_s - sum(parts.values()))
    share = median(sum(spent.get(s, 0.0) for spent in work.values()) / step_s for s, step_s in took.items() if step_s)
    whole = f"{duration(earned.cost_s)}, {100 * earned.cost_s / earned.run_s:.2g} % of the steps' time"
    largest = sorted(parts, key=parts.__getitem__, reverse=True)
    text = ", ".join(f"{name} {duration(parts[name])}" for name in largest if parts[name] >= _SHOWN_S)
    yield RunFinding("warn" if share > _DEAR else "fine", f"the flag's own work took {whole}: {text}")
    ahead = [*takewhile(lambda step: saved[step] >= cost[step], reversed(saved))]
    if ahead and earned.saved_s > 0.0:
        text = f"from step {ahead[-1]} on drafting had saved, in all, at least what it had cost"
        yield RunFinding("fine", text, ahead[-1])


_LOOKS = (_states, _resumed, _acceptance, _speed, _draft, _log_probs, _guard, _costs)


def _steps(steps: Sequence[int]) -> str:
    more = f" and {len(steps) - 6} more" if len(steps) > 6 else ""
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps[:6]))}{more}"
