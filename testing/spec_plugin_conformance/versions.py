"""Which policy version did what, as a trace tells: of synchronous trainers, and of those whose rollouts lag behind."""

from __future__ import annotations

import math
from itertools import pairwise

from spec_plugin_conformance.judge import Event, Trace, actor_events, at_least, audits, cut_rows, events_of

#: nats by which log-probs of one model in single precision differ at most, on the mean of a batch
ROUNDING = 1e-4


def policy_versions(trace: Trace, asynchronous: bool = False) -> list[str]:
    """Actor, engine and every sequence agree on the policy version, and it grows by one each step.

    Args:
        trace: of the run.
        asynchronous: may sequences be older than the policy, and of several versions: then it is known of every token.
    """
    starts = [e["policy_version"] for e in events_of(trace, "spec_rollout_start")]
    problems = at_least(starts, 3, "rollout phases")
    if any(b != a + 1 for a, b in pairwise(starts)):
        problems.append(f"policy versions of the rollouts are {starts}, expected steps of one")
    current: int | None = None
    named = cut_rows(trace)
    for e in actor_events(trace):
        hook = e["hook"]
        if hook == "spec_weight_sync":
            current = e["policy_version"]
            continue
        engine = hook == "audit"
        if "policy_version" not in e or current is None or (engine and e["moment"] in ("synced", "refreshed")):
            continue
        where = f"the engine ({e['moment']})" if engine else hook
        if e["policy_version"] != current:
            problems.append(f"{where} has policy version {e['policy_version']}, the weights are of {current}")
        if hook == "spec_check_logprobs":
            problems += _sampled_by(e, current, asynchronous, named)
    return problems + at_least(audits(trace, "rollout"), 1, "engine states at a rollout")


def _sampled_by(event: Event, current: int, lags: bool, named: set[tuple[float, ...]]) -> list[str]:
    """Each token is known to be of this version; where rollouts lag, to be of versions up to it.

    Of a row that the trainer cuts on purpose, ``named`` by its log-probs, the last request is not whole, and of no known version:
    the end of the row, or all of a row of one request.
    """
    where, rows = f"checked at policy version {current}", event["versions"]
    if all(version < 0 for row in rows for version in row):
        return [f"no sequence {where} is reported with the versions that sampled it"]
    wrong = {i: row for i, row in enumerate(rows) if row and row != [current]}
    shown = event["rows"]["rollout"]
    if shown is not None:
        wrong = {i: r for i, r in wrong.items() if not (r in ([current, -1], [-1]) and tuple(shown[i]) in named)}
    if lags and event["lag_allowed"]:  # else nothing has been cut short yet
        wrong = {i: row for i, row in wrong.items() if not 0 <= row[0] <= row[-1] <= current or min(row) < 0}
    return [f"sequence {i} {where} is reported as sampled by {row}" for i, row in wrong.items()]


def lagging(trace: Trace) -> bool:
    """True if any sequence was older than the policy that recomputed it."""
    return any(int(lag) for e in events_of(trace, "spec_check_logprobs") for lag in e["differences"])


def lags(trace: Trace, tour: Trace = ()) -> list[str]:
    """What an asynchronous run must show: older text, and no more than rounding where no version lies in between.

    Args:
        trace: of the run.
        tour: of faults, if it made one: from where that has log-probs made wrong these show nothing.
    """
    if not lagging(trace):
        return ["no sequence was older than the policy that recomputed it: this trainer is not asynchronous"]
    planted = min((e["policy_version"] for e in tour if e["event"] == "planted"), default=math.inf)
    checked = [e for e in events_of(trace, "spec_check_logprobs") if e["policy_version"] < planted]
    now = max((mean for e in checked for lag, mean in e["differences"].items() if not int(lag)), default=0.0)
    if now > ROUNDING and _single_precision(trace):
        return [
            f"text reported as sampled by the recomputing policy differs by {now:.3g} nats, more than rounding does: "
            "another version sampled it"
        ]
    return []


def resumed(first: Trace, second: Trace) -> list[str]:
    """A run that goes on from a checkpoint goes on counting: it begins with no version from before its first checkpoint.

    Args:
        first: of the run that saved.
        second: of the one that goes on.
    """
    version = saved = None
    for e in events_of(first, "spec_weight_sync", "spec_save"):
        if e["hook"] == "spec_save":
            saved = version
            break
        version = e["policy_version"]
    begun = [e["policy_version"] for e in events_of(second, "spec_weight_sync")]
    if saved is None or not begun or begun[0] >= saved:
        return []  # that nothing was saved, or nothing resumed, others say
    return [
        f"the resumed run begins with policy version {begun[0]}, its first checkpoint was of {saved} or a later one: what was "
        "sampled before passes for what it samples"
    ]


def _single_precision(trace: Trace) -> bool:
    dtypes = {e[name] for e in events_of(trace, "spec_configure") for name in ("actor_dtype", "dtype")}
    return dtypes == {"float32"}
