"""What an adapter leaves out: text that no guard sees, engines without a self-test, harvests without a budget, a logged step.

Pure functions from a trace to problems, as in ``judge``. What is left out raises nothing by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from spec_plugin.api.spans import KEPT_LOG_PROBS
from spec_plugin_conformance.judge import Event, Trace, actor_events, cut_rows, events_of
from spec_plugin_conformance.reported import CHECKED, as_kept, rollout_requests

#: requests in the control group, at least, of which some must be reported: where two responses are of the same text, a plain one
#: and a drafted one, nobody can tell which is which, and a short run may have but one
_CONTROLS = 3
#: where engines keep log-probs aside: one of so many ranks, or fewer, looks at them
_SHOWN_OF = 4
LogProbs = tuple[float, ...]


def responses_checked(trace: Trace, dropped: Sequence[Sequence[int]] = ()) -> list[str]:
    """The guards see whole responses, and all of them, of a trainer that samples, checks and trains in turn.

    Where the trainer skips its log-prob pass, all are seen as the engine stated them. Not all where it asks for no log-probs of
    the engine (which keeps those of some).

    Args:
        trace: of the run.
        dropped: token ids of the whole sequences that the trainer dropped before its loss, on purpose.
    """
    answers, problems = _engine_answers(trace, [list(ids) for ids in dropped]), []
    shown = {version: _logprobs_shown(trace, version) for version in answers}
    rows = [row for found in shown.values() for row in found]
    cut = [row for version, found in shown.items() for row in found if _is_part(row, answers[version])]
    if rows and 2 * len(cut) > len(rows):
        problems.append(
            f"{len(cut)} of {len(rows)} sequences that a guard was shown are parts of the engine's responses: the mask leaves "
            "sampled tokens out"
        )
        return problems
    trained = [v for v, found in shown.items() if found or v < max(shown)]  # a run may be killed before its last check
    whole = [version for version in trained if not _log_probs_kept(trace, version)]
    sampled = sum(len(answers[version]) for version in whole)
    named = cut_rows(trace)
    seen = sum(_responses_seen(answers[version], shown[version], named) for version in whole)
    if seen < sampled:
        problems.append(
            f"a guard has seen {seen} of {sampled} responses that were trained on; of the others nothing was checked, or a part "
            "of which the adapter does not say that the trainer cut it on purpose (Responses.cut)"
        )
    few = [v for v in trained if v not in whole and _SHOWN_OF * len(shown[v]) < min(KEPT_LOG_PROBS, len(answers[v]))]
    if few:
        problems.append(
            f"policy versions {few}: the engine has stated log-probs of "
            f"{sum(len(answers[v]) for v in few)} responses, and a guard was shown those of {sum(len(shown[v]) for v in few)}"
        )
    return problems


def _engine_answers(trace: Trace, dropped: Sequence[list[int]]) -> dict[int, set[LogProbs]]:
    """What the engines answered in each phase, by policy version, less what was dropped, or was not asked the log-probs of."""
    found: dict[int, set[LogProbs]] = {}
    dtypes = {e["rollout_dtype"] for e in trace if e["hook"] == "spec_check_logprobs" and e["rollout"]}
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    session = next((e["session"] for e in actor_events(trace)), None)
    version: int | None = None
    for e in trace:
        if e["hook"] == "engine_request" and version is not None and not e["test"]:
            turns = e.get("sequences", ())  # of which several may be in one that was dropped
            if any(ids[: len(turn)] == turn for turn in turns for ids in dropped):
                continue
            if e["log_probs"] and None not in e["log_probs"]:
                found.setdefault(version, set()).add(tuple(as_kept(e["log_probs"], dtype)))
        elif e["session"] == session and e["hook"] == "spec_rollout_start":
            version = e["policy_version"]
        elif e["session"] == session and e["hook"] == "spec_rollout_end":
            version = None
    return found


def _logprobs_shown(trace: Trace, version: int) -> list[LogProbs]:
    events = (e for e in trace if e["hook"] in CHECKED and e["rollout"])
    rows = (row for e in events if e["policy_version"] == version for row in e["rows"]["rollout"])
    return [tuple(row) for row in rows if row]


def _log_probs_kept(trace: Trace, version: int) -> bool:
    """True if the trainer asks for no log-probs of the engines, which keep those of some responses of this version."""
    return any(e["hook"] in CHECKED and e["policy_version"] == version and not e["rollout"] for e in trace)


def _is_part(row: LogProbs, answers: set[LogProbs]) -> bool:
    """True if the row is a stretch of a longer answer, and no answer by itself."""
    if row in answers:
        return False
    longer = (answer for answer in answers if len(answer) > len(row))
    return any(answer[i : i + len(row)] == row for answer in longer for i in range(len(answer) - len(row) + 1))


def _responses_seen(answers: set[LogProbs], rows: Sequence[LogProbs], named: set[LogProbs]) -> int:
    """How many answers a guard has been shown, or what a trainer has left of them that it cuts, by ``named`` rows.

    A row may hold several, the turns of a conversation: what stood between them the mask leaves out. Of a row that is cut, the
    last turn may have lost its end.
    """
    seen, cut = set(rows) & answers, []
    for row in set(rows) - answers:
        turns, rest = _turns(row, answers)
        if not rest or row in named:
            seen |= set(turns)
            cut += [rest] if rest else []
    for rest in cut:  # each of one answer that nothing else shows
        seen |= set([answer for answer in answers - seen if answer[: len(rest)] == rest][:1])
    return len(seen)


def _turns(row: LogProbs, answers: set[LogProbs]) -> tuple[list[LogProbs], LogProbs]:
    """The answers that a row begins with, one behind the other, and what is left of it: as little as can be."""
    best: tuple[list[LogProbs], LogProbs] = ([], row)
    for first in sorted((a for a in answers if a and row[: len(a)] == a), key=len, reverse=True):
        others, rest = _turns(row[len(first) :], answers)
        if len(rest) < len(best[1]):
            best = [first, *others], rest
        if not rest:
            break
    return best


def undrafted_tokens_reported(trace: Trace) -> list[str]:
    """Of phases that draft, no more tokens are reported as plain than the engine was asked to sample so, and some if it was."""
    told = sum(e["plain"] for e in trace if e["hook"] == "spec_check_logprobs" and e["speculating"])
    answered = rollout_requests(trace)
    asked = sum(e["plain"] for e in answered)
    if told > asked:
        return [
            f"{told} tokens are reported as sampled without drafts, the engine was asked for {asked} of them: the guard takes "
            "them for its reference, and judges the others only"
        ]
    if not told and sum(bool(e["plain"]) for e in answered) >= _CONTROLS:
        return [f"the engine sampled {asked} tokens without drafts, and the adapter reports none to the guard"]
    return []


def engines_tested(trace: Trace) -> list[str]:
    """Each engine that rolls out has answered the self-test before."""
    tested: set[tuple[int, int]] = set()
    untested: set[tuple[int, int]] = set()
    for e in trace:
        if e["hook"] != "engine_request_begins":
            continue
        engine = e["pid"], e.get("engine", 0)
        if e["test"]:
            tested.add(engine)
        elif engine not in tested:
            untested.add(engine)
    engines = len(tested | untested)
    return [f"{len(untested)} of {engines} engines rolled out before their self-test"] if untested else []


def budgets_opened(trace: Trace) -> list[str]:
    """The harvest of each step has a budget of its own, where the adapter uses ``RolloutHarvest``."""
    events = actor_events(trace, watched=True)
    if not any(e["hook"] == "harvest_opened" for e in events):
        return []
    starts = [i for i, e in enumerate(events) if e["hook"] == "spec_rollout_start"]
    problems = []
    for begin, end in pairwise(starts):
        hooks = [e["hook"] for e in events[begin:end]]
        version, opened = events[begin]["policy_version"], hooks.count("harvest_opened")
        if opened > 1:
            problems.append(
                f"in the step of policy version {version} RolloutHarvest.open was called {opened} times, and each call grants a "
                "whole budget: call it once a step"
            )
        if "spec_target_forward" in hooks and not opened:
            problems.append(
                f"in the step of policy version {version} hidden states were harvested without RolloutHarvest.open: harvesting "
                "stops when the first budget is used up; call it once a step"
            )
    return problems


def metrics_a_step_late(trace: Trace, logged: Mapping[int, Mapping[str, float]], prefix: str) -> list[str]:
    """The log shows, with each step, that step's metrics, and not those of the step before."""
    handed = [e["values"] for e in events_of(trace, "handed_metrics")]
    steps = [metrics for _, metrics in sorted(logged.items())]
    now = [_same(a, b, prefix) for a, b in zip(handed, steps, strict=False)]
    before = [_same(a, b, prefix) for a, b in zip(handed, steps[1:], strict=False)]
    if len(before) >= 2 and not all(now) and all(before):
        return [f"each step's {prefix}spec/ metrics are logged with the step after it"]
    return []


def _same(handed: Mapping[str, Any], logged: Event, prefix: str) -> bool:
    """True if the logged values are the handed out ones, as far as they were logged, but for rounding."""
    both = [(value, logged[f"{prefix}{name}"]) for name, value in handed.items() if f"{prefix}{name}" in logged]
    return bool(both) and all(abs(a - b) <= 1e-3 * max(abs(a), abs(b)) + 1e-6 for a, b in both)
