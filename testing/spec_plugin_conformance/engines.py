"""What reached each engine: requests as without the flag, concurrent, timed by its own clock; phases, tables, all weights.

Pure functions from a trace to problems, as in ``judge``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from draft_training import row_digests
from spec_plugin_conformance.judge import Event, Trace, actor_events, at_least
from spec_plugin_conformance.places import Rows, missing
from spec_plugin_conformance.reported import rollout_requests

#: share of the requests of one engine and phase that must be in flight at once; and how many there must be to ask that where
#: phases overlap, so that one may hold the end of one request and the beginning of the next
_TOGETHER, _MANY = 0.25, 4
#: a phase's seconds are those with a request in flight, but for this factor and so many seconds of a busy machine
_FACTOR, _SLACK_S = 2.0, 0.5
#: an option of the plugin, and a value that it refuses
WRONG_OPTION, WRONG_VALUE = "train_share", 7.5

Engine = tuple[int, int]


def _engine(event: Event) -> Engine:
    return event["pid"], event["engine"]


def requests_as_configured(trace: Trace, configured: Mapping[str, Any]) -> list[str]:
    """Each request asks for the length, the stops and all else that the trainer's configuration says.

    Args:
        trace: of the run.
        configured: ``ConformanceDriver.requests``.
    """
    found: dict[tuple[str, str, str], int] = {}
    requests = rollout_requests(trace)
    for e in requests:
        for name in e["asked"].keys() | configured.keys():
            asked, expected = e["asked"].get(name), configured.get(name)
            if not _as_expected(asked, expected):
                key = name, _spoken(asked), _spoken(expected)
                found[key] = found.get(key, 0) + 1
    problems = [
        f"{count} of {len(requests)} requests ask for {name}={asked}; the trainer's configuration says {expected}"
        for (name, asked, expected), count in sorted(found.items())
    ]
    return problems + at_least(requests, 1, "requests of rollouts")


def _as_expected(asked: Any, expected: Any) -> bool:
    if isinstance(expected, tuple):
        least, most = expected
        return asked is not None and bool(least <= asked <= most)
    return bool(asked == expected)


def _spoken(value: Any) -> str:
    if isinstance(value, tuple):
        return "{} to {}".format(*value)
    return "vLLM's default" if value is None else str(value)


def _phases(trace: Trace) -> Iterator[tuple[Event, Event, dict[Engine, list[tuple[float, float]]]]]:
    """Begin and end of each phase that samples, and when each engine's requests ran in it."""
    session = next((e["session"] for e in actor_events(trace)), None)
    requests = rollout_requests(trace)
    begin: Event | None = None
    for e in trace:
        if e["session"] != session:
            continue
        if e["hook"] == "spec_rollout_start":
            begin = e
        elif e["hook"] == "spec_rollout_end" and begin is not None:
            found: dict[Engine, list[tuple[float, float]]] = {}
            for r in requests:
                first, last = max(r["began"], begin["time"]), min(r["time"], e["time"])
                if first < last:
                    found.setdefault(_engine(r), []).append((first, last))
            if found:
                yield begin, e, found
            begin = None


def ran_concurrently(trace: Trace, asynchronous: bool) -> list[str]:
    """Requests of one engine are in flight together, and not one after the other.

    Args:
        trace: of the run.
        asynchronous: may phases overlap.
    """
    problems, phases = [], 0
    for begin, _, engines in _phases(trace):
        for intervals in engines.values():
            if len(intervals) < (_MANY if asynchronous else 2):
                continue
            phases += 1
            most = _most_at_once(intervals)
            if most < max(2, _TOGETHER * len(intervals)):
                problems.append(
                    f"policy version {begin['policy_version']}: of {len(intervals)} requests of an engine at most {most} ran at "
                    "once: something between trainer and engine lets them through one by one"
                )
    return problems + at_least(range(phases), 1, "phases with several requests of an engine")


def _most_at_once(intervals: Sequence[tuple[float, float]]) -> int:
    moves = sorted([(first, 1) for first, _ in intervals] + [(last, -1) for _, last in intervals])
    return max(itertools.accumulate(by for _, by in moves), default=0)


def phase_seconds(trace: Trace, asynchronous: bool) -> list[str]:
    """The seconds of a phase are those in which requests were in flight, on the clock of the engine that had them.

    Args:
        trace: of the run.
        asynchronous: do phases hold the time of a pause: then they may be shorter.
    """
    problems, phases = [], 0
    for begin, end, engines in _phases(trace):
        phases += 1
        ran = max(_length(intervals) for intervals in engines.values())
        too_long = end["seconds"] > _FACTOR * ran + _SLACK_S
        too_short = not asynchronous and end["seconds"] * _FACTOR + _SLACK_S < ran
        if too_long or too_short:
            problems.append(
                f"policy version {begin['policy_version']}: the phase is reported to have taken {end['seconds']:.2f} s, requests "
                f"were in flight for {ran:.2f} s"
            )
    begun = [e for e in trace if e["hook"] == "engine_request_begins" and not e["test"]]
    for clock, what in (("another", "another engine's clock"), ("none", "no engine's clock")):
        if found := sum(e["clock"] == clock for e in begun):
            problems.append(f"{found} of {len(begun)} requests were timed on {what}")
    return problems + at_least(range(phases), 1, "phases with requests")


def _length(intervals: Sequence[tuple[float, float]]) -> float:
    """Seconds of the union of the intervals."""
    total, until = 0.0, float("-inf")
    for first, last in sorted(intervals):
        total += max(0.0, last - max(first, until))
        until = max(until, last)
    return total


def every_engine_informed(trace: Trace) -> list[str]:
    """``start_phase``, the same table of k, and ``state`` reached each engine that samples, in each phase."""
    serving = {_engine(e) for e in trace if e["hook"] == "engine_request_begins" and not e["test"]}
    tables: dict[Engine, list[int]] = {}
    phases: dict[int, dict[Engine, list[int] | None]] = {}
    shown: dict[int, set[Engine]] = {}
    for e in trace:
        if e["hook"] == "engine_schedule":
            tables[_engine(e)] = e["table"]
        elif e["hook"] == "engine_phase":
            phases.setdefault(e["policy_version"], {})[_engine(e)] = tables.get(_engine(e))
        elif e["hook"] == "engine_state" and e["moment"] == "rollout":
            shown.setdefault(e["policy_version"], set()).add(_engine(e))
    over = {begin["policy_version"] for begin, _, _ in _phases(trace)}
    problems = at_least(sorted(over & phases.keys()), 1, "phases that engines were told of")
    for version in sorted(over):
        begun = phases.get(version, {})
        if missing := len(serving - begun.keys()):
            problems.append(f"policy version {version}: {missing} of {len(serving)} engines did not get start_phase")
        if len({str(table) for engine, table in begun.items() if engine in serving}) > 1:
            problems.append(
                f"policy version {version}: engines draft by different tables of k; set_schedule must reach all"
            )
        if silent := len(serving - shown.get(version, set())):
            problems.append(
                f"policy version {version}: {silent} of {len(serving)} engines were never asked for their state"
            )
    return problems


def in_parts(trace: Trace) -> bool:
    """True if tensor parallel ranks shard the weights of an engine."""
    return any(e["tensor_parallel"] > 1 for e in trace if e["hook"] == "engine_configured")


def weights_arrived(trace: Trace, policy: Mapping[str, Tensor]) -> list[str]:
    """Every weight of a checkpoint is one that the engine had, row by row and in its place, when it rolled out with that policy.

    Args:
        trace: of the run.
        policy: weights of one of its checkpoints.
    """
    held = [e["rows"] for e in trace if e["hook"] == "engine_rows"]
    dtypes = {e["dtype"] for e in trace if e["hook"] == "engine_configured"}
    problems = at_least(held, 1, "looks at an engine's weights")
    if problems or len(dtypes) != 1:
        return problems or [
            f"the engines have several dtypes, {', '.join(sorted(dtypes))}: none to compare a checkpoint in"
        ]
    (engine,) = dtypes
    lost = min((_missing(policy, engine, rows) for rows in held), key=len)
    if lost:
        names = ", ".join(lost[:4]) + (", …" if len(lost) > 4 else "")
        problems.append(
            f"{len(lost)} of {len(policy)} weights never came to an engine as they are in the checkpoint, in their place: {names}"
        )
    return problems


def _missing(policy: Mapping[str, Tensor], engine: str, rows: Mapping[str, Mapping[str, Rows]]) -> list[str]:
    """Names of weights that the engine does not hold in their place, in the coarser of both dtypes."""
    found = []
    for coarse in (False, True):
        part = {n: t for n, t in policy.items() if (t.dtype == torch.bfloat16 and engine == "float32") == coarse}
        wanted = {n: row_digests(t if coarse else t.to(getattr(torch, engine))) for n, t in part.items()}
        found += missing(wanted, rows["bfloat16" if coarse else "own"])
    return found


def options_refused(metrics: Mapping[int, Any], failure: str | None, trace: Trace) -> list[str]:
    """An option that the plugin cannot take stops the run, with its name, before anything is sampled."""
    problems = []
    if failure is None:
        problems.append(
            "the run went on to its end, with an option that the plugin refuses: without the flag, or with another value"
        )
    elif WRONG_OPTION not in failure:
        problems.append(f"the run stopped without naming the option {WRONG_OPTION}: {failure[-400:]}")
    if metrics or rollout_requests(trace):
        problems.append("the run sampled or trained before it stopped")
    return problems
