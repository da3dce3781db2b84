"""Which policy version did what, as a trace tells: of synchronous trainers, and of those whose rollouts lag behind."""

from __future__ import annotations

import math
from itertools import pairwise

from spec_plugin.conformance.judge import Event, Trace, actor, at_least, audits, of

#: nats by which log-probs of one model in single precision differ at most, on the mean of a batch
ROUNDING = 1e-4


def policy_versions(trace: Trace, asynchronous: bool = False) -> list[str]:
    """Actor, engine and every sequence agree on the policy version, and it grows by one each step.

    Args:
        trace: of the run.
        asynchronous: may sequences be older than the policy, and of several versions: then it is known of every token.
    """
    starts = [e["policy_version"] for e in of(trace, "spec_rollout_start")]
    problems = at_least(starts, 3, "rollout phases")
    if any(b != a + 1 for a, b in pairwise(starts)):
        problems.append(f"policy versions of the rollouts are {starts}, expected steps of one")
    current: int | None = None
    for e in actor(trace):
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
            problems += (_token_versions if asynchronous else _sequence_versions)(e, current)
    return problems + at_least(audits(trace, "rollout"), 1, "engine states at a rollout")


def _sequence_versions(event: Event, current: int) -> list[str]:
    versions = event["rollout_versions"]
    if versions is None:
        return [f"no sequence of policy version {current} says which version sampled it"]
    wrong = sorted(set(versions) - {current})
    return [f"sequences checked at policy version {current} were sampled by {wrong}"] if wrong else []


def _token_versions(event: Event, current: int) -> list[str]:
    where = f"checked at policy version {current}"
    if not event["lag_allowed"]:  # nothing has been cut short yet
        return _sequence_versions(event, current)
    spans, tokens = event["spans"], event["token_versions"]
    if spans is None or tokens is None:
        return [f"no sequence {where} says which versions sampled it"]
    problems = []
    for i, ((first, last), found) in enumerate(zip(spans, tokens, strict=True)):
        if not first <= last <= current:
            problems.append(f"sequence {i} {where} is said to be of versions {first} to {last}")
        if found and (found[0], found[-1]) != (first, last):
            problems.append(f"sequence {i} {where} is said to be of {first} to {last}, its tokens of {found}")
    return problems


def lagging(trace: Trace) -> bool:
    """Was any sequence older than the policy that recomputed it."""
    return any(int(lag) for e in of(trace, "spec_check_logprobs") for lag in e["differences"])


def lags(trace: Trace, tour: Trace = ()) -> list[str]:
    """What an asynchronous run must show: older text, and no more than rounding where no version lies in between.

    Args:
        trace: of the run.
        tour: of faults, if it made one: from where that has log-probs made wrong these show nothing.
    """
    if not lagging(trace):
        return ["no sequence was older than the policy that recomputed it: this trainer is not asynchronous"]
    planted = min((e["policy_version"] for e in tour if e["event"] == "planted"), default=math.inf)
    checked = [e for e in of(trace, "spec_check_logprobs") if e["policy_version"] < planted]
    now = max((mean for e in checked for lag, mean in e["differences"].items() if not int(lag)), default=0.0)
    if now > ROUNDING and _single_precision(trace):
        return [
            f"text that the recomputing policy is said to have sampled differs by {now:.3g} nats: that is no rounding"
        ]
    return []


def _single_precision(trace: Trace) -> bool:
    dtypes = {e[name] for e in of(trace, "spec_configure") for name in ("actor_dtype", "dtype")}
    return dtypes == {"float32"}
