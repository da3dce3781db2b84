"""What an adapter reports, compared with its source: the engine's answers and configuration, the trainer's steps and tensors.

Pure functions from a trace to problems, as in ``judge``. The sources are what ``watch`` recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from spec_plugin_conformance.judge import Event, Trace, actor_events, at_least, events_of
from spec_plugin_conformance.plants import LOGPROB, NAN, PLANTED, VERSION
from spec_plugin_conformance.versions import ROUNDING

#: mean difference, in nats, of log-probs of the same text by the same weights, computed in this dtype in two ways
_AGREE = {"float32": ROUNDING, "float16": 5e-3, "bfloat16": 2e-2}
#: tokens, at least, over which that is a mean: one or two roundings of a short answer are not averaged out
_FEW = 8
_SINGLE = "float32"
#: what is planted, in a sentence
_SPOKEN = {LOGPROB: "a wrong log-prob", NAN: "a NaN", VERSION: "a wrong policy version"}
#: hooks that judge log-probs
CHECKED = frozenset({"spec_check_logprobs", "spec_check_stated"})


def _events(trace: Trace, *hooks: str) -> list[Event]:
    """The events of these hooks in every process."""
    return [e for e in trace if e["hook"] in hooks]


def rollout_requests(trace: Trace) -> list[Event]:
    """Completed engine requests, without the self-test's."""
    return [e for e in _events(trace, "engine_request") if not e["test"]]


def as_kept(values: Sequence[float], dtype: str) -> list[float]:
    """Log-probs of the engine, as a trainer has them that keeps them in this dtype."""
    kept: list[float] = torch.tensor(values, dtype=torch.float32).to(getattr(torch, dtype)).tolist()
    return kept


def logprobs_from_engine(trace: Trace) -> list[str]:
    """Each rollout log-prob that a guard is shown is one that vLLM has answered."""
    answered = [v for e in rollout_requests(trace) for v in e["log_probs"] if v is not None]
    problems, shown = [], 0
    known: dict[str, set[float]] = {}
    for e in _events(trace, *CHECKED):
        if not e["rollout"]:
            continue
        dtype = e["rollout_dtype"]
        if dtype not in known:
            known[dtype] = set(as_kept(answered, dtype))
        values = [v for row in e["rows"]["rollout"] for v in row]
        shown += len(values)
        foreign = sum(v not in known[dtype] for v in values)
        if foreign:
            problems.append(
                f"policy version {e['policy_version']}: {foreign} of {len(values)} rollout log-probs were never "
                "reported by the engine"
            )
    return problems if shown else [*problems, "no rollout log-prob was shown to a guard"]


def checked_before_update(trace: Trace) -> list[str]:
    """The policy is not updated before the log-probs have been checked, whether anything was drafted or not."""
    events = actor_events(trace, watched=True)
    starts = [i for i, e in enumerate(events) if e["hook"] == "spec_rollout_start"]
    problems, updates = [], 0
    for begin, end in pairwise([*starts, len(events)]):
        hooks = [e["hook"] for e in events[begin:end]]
        if "policy_update" not in hooks:
            continue
        updates += 1
        before = hooks[: hooks.index("policy_update")]
        if not CHECKED & set(before):
            late = "only checked afterwards" if CHECKED & set(hooks) else "never checked"
            problems.append(
                f"the log-probs of policy version {events[begin]['policy_version']} entered an update and were {late}"
            )
    return problems + at_least(range(updates), 2, "updates of the policy")


def planted_errors_refused(tour: Trace, asynchronous: bool) -> list[str]:
    """A wrong log-prob or policy version, planted in the engine, reaches the guard, which refuses it.

    Args:
        tour: of the faults.
        asynchronous: sequences may be older than the policy: then an older version is no error.
    """
    problems = []
    for what in (LOGPROB, NAN) if asynchronous else (LOGPROB, VERSION, NAN):
        found = [e for e in tour if e["event"] in ("refused", "missed") and e["what"] == what]
        if not found:
            problems.append(f"the run ended before {_SPOKEN[what]} was planted")
        elif found[0]["event"] == "missed":
            problems.append(f"{_SPOKEN[what]} was planted in each of the engine's responses, and no guard has seen it")
        elif " recomputed log-probs are not finite" in found[0]["why"]:
            problems.append(
                f"{_SPOKEN[what]} planted in the engine reached the guard as the actor's: the engine is compared with itself"
            )
        elif what == NAN and "not finite" not in found[0]["why"]:
            problems.append(
                "a NaN planted in the engine's log-probs reached the guard as a number: something on the way replaces NaN"
            )
    return problems


def self_test_stopped(trace: Trace, failure: str | None) -> list[str]:
    """An engine that says that its self-test failed stops the run before the first rollout, with that reason."""
    problems = []
    if failure is None:
        problems.append("the run went on to its end with a failed self-test")
    elif PLANTED not in failure and "LosslessError" not in failure:
        problems.append(f"the run stopped without naming LosslessError: {failure[-400:]}")
    if rollout_requests(trace):
        problems.append(f"{len(rollout_requests(trace))} responses were sampled after the self-test had failed")
    return problems + at_least(_events(trace, "spec_configure"), 1, "sessions")


def engine_facts(trace: Trace) -> list[str]:
    """``TargetInfo`` says of the engine what its configuration says, and of the sampling what the requests ask for."""
    engines, sessions, requests = (
        _events(trace, "engine_configured"),
        _events(trace, "spec_configure"),
        rollout_requests(trace),
    )
    problems = []
    for engine in engines:
        for name, shown in engine["shown"].items():
            if shown != engine["has"][name]:
                problems.append(
                    f"the allow-list was shown the engine option {name}={shown}, the engine has {engine['has'][name]}"
                )
        for name, told, has in _compared(sessions, engine):
            if told != has:
                problems.append(f"TargetInfo.{name} is {told}, the engine was built with {has}")
    asked = {_words(e["sampling"]) for e in requests}
    told_sampling = {_words(e["sampling"]) for e in sessions}
    if requests and asked != told_sampling:
        problems.append(
            f"TargetInfo.sampling is {' and '.join(told_sampling)}, the requests sample with {' and '.join(sorted(asked))}"
        )
    problems = list(dict.fromkeys(problems))
    return problems + at_least(engines, 1, "engines") + at_least(requests, 1, "requests of rollouts")


def _compared(sessions: Iterable[Event], engine: Event) -> Iterator[tuple[str, Any, Any]]:
    for session in sessions:
        for name, told in session["engine"].items():
            has = engine[name]
            if name == "load_format":  # what matters is whether there are weights before the first sync
                told, has = told == "dummy", has == "dummy"
            if told is not None:
                yield name, told, has


def _words(sampling: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted(sampling.items())) or "vLLM's defaults"


def trainer_facts(trace: Trace, asynchronous: bool) -> list[str]:
    """``TargetInfo.actor_dtype`` is that of the hidden states; ``lag_allowed`` is set in asynchronous trainers only.

    Residual streams may be wider than what computes them (autocast), so a half precision is wrong where single precision
    states come with log-probs that no half precision has.
    """
    problems = []
    states = {e["dtype"] for e in _events(trace, "spec_target_forward")}
    told = {e["actor_dtype"] for e in events_of(trace, "spec_configure")}
    if told == {_SINGLE} and states - {_SINGLE}:
        problems.append(f"TargetInfo.actor_dtype is {_SINGLE}, the hidden states are {' and '.join(states)}")
    apart = _apart(trace)
    if _SINGLE not in told and states == {_SINGLE} and apart and max(apart) < ROUNDING:
        problems.append(
            f"TargetInfo.actor_dtype is {' and '.join(told)}, but the hidden states are {_SINGLE}, and log-probs differ by no "
            f"more than {max(apart):.1g} nats"
        )
    if not asynchronous and any(e["lag_allowed"] for e in _events(trace, "spec_check_logprobs")):
        problems.append(
            "LogprobBatch.lag_allowed is set, but no sequence is older than the policy in a synchronous trainer"
        )
    return problems


def _apart(trace: Trace) -> list[float]:
    """Mean differences of text that the recomputing policy has sampled."""
    checked = _events(trace, "spec_check_logprobs")
    return [mean for e in checked for lag, mean in e["differences"].items() if not int(lag)]


def drafted_batches_reported(trace: Trace, asynchronous: bool) -> list[str]:
    """A batch that was sampled with drafts is reported so.

    Args:
        trace: of a run that drafts.
        asynchronous: a batch may be of several phases: then it is a drafted one only if all of them are.
    """
    phases = [e for e in events_of(trace, "spec_rollout_end") if e["tokens"]]
    drafted = {e["policy_version"] for e in phases if e["drafts"]}
    always = all(e["drafts"] for e in phases)
    problems = [
        f"the batch of policy version {e['policy_version']} is reported as plain, but was sampled with drafts"
        for e in _events(trace, "spec_check_logprobs")
        if not e["speculating"] and (always if asynchronous else e["policy_version"] in drafted)
    ]
    return problems + at_least(sorted(drafted), 1, "phases with drafts")


def undrafted_batches_reported(trace: Trace, tour: Trace) -> list[str]:
    """A batch that was sampled without drafts is not reported as drafted.

    Args:
        trace: of a run that has such phases.
        tour: which those are.
    """
    plain = {e["policy_version"] for e in tour if e["event"] == "plain" and not e["drafts"]}
    problems = [
        f"the batch of policy version {e['policy_version']} is reported as drafted, but was sampled without drafts"
        for e in _events(trace, "spec_check_logprobs")
        if e["speculating"] and e["policy_version"] in plain
    ]
    return problems + at_least(sorted(plain), 1, "plain phases")


def weights_arrived(trace: Trace, draft: bool = True) -> list[str]:
    """The embedding and the head that each sync announces are those that the engine then has, and all other weights arrive, too.

    That all others do, and as exact as they left, is seen where both sides compute in single precision: by the log-probs.

    Args:
        trace: of a run that drafts.
        draft: has the method one, for whose sake the sync announces both.
    """
    problems, compared, held = [], 0, None
    for e in actor_events(trace):
        if e.get("changed"):
            problems.append(
                f"step {e['step']}: the {' and the '.join(e['changed'])} that the weight sync announced changed with the update: "
                "hand over copies, or the draft learns from another policy than the one that sampled"
            )
        if e["hook"] == "audit" and e["moment"] == "synced":
            held = e
        elif e["hook"] == "spec_weight_sync" and held is not None:
            for name, key in (("embedding", "embed_digest"), ("head", "head_digest")):
                if e[key] and held[key]:
                    compared += 1
                    if e[key] != held[key]:
                        problems.append(
                            f"policy version {e['policy_version']}: the {name} that the weight sync announced is not the engine's"
                        )
    parts = any(e["engine"]["tensor_parallel"] > 1 for e in _events(trace, "spec_configure"))
    if draft and not parts:
        problems += at_least(range(compared), 2, "embeddings or heads with their engine's")
    apart = _apart(trace)
    if _single(trace) and apart and max(apart) > ROUNDING:
        problems.append(
            f"log-probs of sampling and recomputation, both in single precision, differ by {max(apart):.3g} nats: the engine "
            "does not have the weights that the actor has"
        )
    return problems


def _single(trace: Trace) -> bool:
    """Do actor and engine compute in single precision, by what was seen of both."""
    states = {e["dtype"] for e in _events(trace, "spec_target_forward")} or {
        e["actor_dtype"] for e in events_of(trace, "spec_configure")
    }
    return states | {e["dtype"] for e in _events(trace, "engine_configured")} == {_SINGLE}


def states_of_the_policy(trace: Trace) -> list[str]:
    """The harvested states, put through the engine's head, give the log-probs that the policy recomputed, at each version."""
    problems, later = [], 0
    checked = _events(trace, "spec_check_logprobs")
    engines = [_AGREE[e["dtype"]] for e in _events(trace, "engine_configured")]  # their head is rounded to that
    for e in _events(trace, "spec_target_forward"):
        version, rows = e["policy_version"], e["log_probs"]
        recomputed = [r for c in checked if c["policy_version"] == version for r in c["rows"]["recomputed"]]
        if rows is None or not recomputed:
            continue
        later += version > 0
        nearest = _nearest_part if any(e.get("offsets", ())) else _nearest
        far = [f for row in rows if row and (f := nearest(row, recomputed)) > max([_AGREE[e["dtype"]], *engines])]
        if far:
            problems.append(
                f"policy version {version}: hidden states of {len(far)} of {len(rows)} documents are not the policy's: their "
                f"log-probs differ from the recomputed ones by {max(far):.3g} nats"
            )
    return problems + at_least(range(later), 1, "harvests of a later policy version than 0")


def _nearest(row: Sequence[float], others: Sequence[Sequence[float]]) -> float:
    """Mean difference to the most similar of those that end as this one is long; a document may have been cut."""
    alike = [other[-len(row) :] for other in others if len(other) >= len(row)]
    return min((sum(abs(a - b) for a, b in zip(row, o, strict=True)) for o in alike), default=0.0) / max(_FEW, len(row))


def _nearest_part(row: Sequence[float], others: Sequence[Sequence[float]]) -> float:
    """The same of a part of a document, which ends wherever it was cut: to the most similar stretch of any of them."""
    alike = [sliding_window_view(np.array(other), len(row)) for other in others if len(other) >= len(row)]
    apart = min((float(np.abs(stretches - np.array(row)).sum(1).min()) for stretches in alike), default=0.0)
    return apart / max(_FEW, len(row))


def tokens_counted(trace: Trace) -> list[str]:
    """The tokens of each phase are those that vLLM has sampled in it, of the requests of all engines."""
    problems, phases, sampled = [], 0, None
    session = next((e["session"] for e in actor_events(trace)), None)
    for e in trace:
        if e["hook"] == "engine_request" and sampled is not None and not e["test"]:
            sampled += len(e["log_probs"])
        elif e["session"] != session:
            continue
        elif e["hook"] == "spec_rollout_start":
            sampled = 0
        elif e["hook"] == "spec_rollout_end" and sampled is not None:
            phases += 1
            if e["tokens"] != sampled:
                problems.append(
                    f"policy version {e['policy_version']}: {e['tokens']} tokens were counted, the engine sampled {sampled}"
                )
            sampled = None
    return problems + at_least(range(phases), 2, "phases")


def tokens_counted_asynchronous(trace: Trace) -> list[str]:
    """The same where requests go on from phase to phase: all phases together count no more than vLLM has sampled.

    A request that was still in flight when the run was killed may have sampled as much as the longest of the others.
    """
    phases, answers = events_of(trace, "spec_rollout_end"), rollout_requests(trace)
    begun = sum(not e["test"] for e in _events(trace, "engine_request_begins"))
    lengths = [len(e["log_probs"]) for e in answers]
    counted, most = sum(e["tokens"] for e in phases), sum(lengths) + (begun - len(answers)) * max(lengths, default=0)
    problems = at_least(phases, 2, "phases") + at_least(answers, 1, "requests of rollouts")
    return (
        [*problems, f"{counted} tokens were counted, the engine sampled at most {most}"] if counted > most else problems
    )


def metrics_logged(trace: Trace, logged: Mapping[int, Mapping[str, float]], prefix: str) -> list[str]:
    """Every metric that the session hands out is in the trainer's log, with a value that it had."""
    handed = [e["values"] for e in events_of(trace, "handed_metrics")]
    known: dict[str, list[float]] = {}
    for values in handed[: len(logged)]:  # the last ones may not have come as far as the log
        for name, value in values.items():
            known.setdefault(name, []).append(value)
    problems = at_least(handed, 2, "steps whose metrics were handed out")
    found: dict[str, list[float]] = {}
    for metrics in logged.values():
        for name, value in metrics.items():
            found.setdefault(name, []).append(value)
    if missing := sorted(name for name in known if f"{prefix}{name}" not in found):
        problems.append(f"{len(missing)} of {len(known)} metrics never reach the log: {', '.join(missing)}")
    all_values: dict[str, list[float]] = {}
    for values in handed:
        for name, value in values.items():
            all_values.setdefault(name, []).append(value)
    for name, values_of in all_values.items():
        low, high = min(values_of), max(values_of)
        slack = 1e-3 * max(abs(low), abs(high)) + 1e-6
        for value in found.get(f"{prefix}{name}", ()):
            if not low - slack <= value <= high + slack:
                problems.append(f"{prefix}{name} is logged as {value:g}, it was between {low:g} and {high:g}")
    return problems


def random_streams(with_flag: Mapping[str, Any], without: Mapping[str, Any]) -> list[str]:
    """A trainer's random streams are, in a checkpoint, where they are without the flag."""
    if not with_flag or with_flag.keys() != without.keys():
        return [
            f"the checkpoints hold other random streams: {sorted(with_flag)} with the flag, {sorted(without)} without"
        ]
    return [
        f"the random stream {name} is elsewhere than without the flag: the adapter or a plugin drew from it"
        for name in with_flag
        if with_flag[name] != without[name]
    ]
