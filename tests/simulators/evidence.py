"""The tables of docs/guards.md on evidence of exact sampling, from ``simulators.exactness``."""

from __future__ import annotations

import statistics
from functools import partial

from simulators import drafts_law, exactness
from simulators.shown import Map, Shown

#: chosen tokens of a phase, of 64 ranks together: without a card, at a vocabulary of 152k and a width of 4096
_CHOSEN = round(64 * 29 / 4)
#: correct runs for each run of a wrong engine, and for each of a way to choose tokens
_WRONG, _SELECTED = 30, 60
#: of each entropy, wrong engines that must be stopped within so many thousand tokens in the median run
_STOPPED = {"temperature 0.9": 20, "temperature 1.1": 20, "the same in 10 %": 250, "one token for 1 % of all (NaN)": 30}


def right_engines(mapped: Map, runs: int, phases: int) -> Shown:
    """Engines that sample from the policy, under the evidence from the run's own text."""
    out = Shown(
        f"Evidence of exact sampling, correct runs, {_CHOSEN:,} chosen tokens a phase",
        ("policy", "runs", "phases of each", "stopped (1e-7)", "at 1e-2", "at 1e-3: a line", "warned of, stated alike"),
    )
    for entropy in exactness.ENTROPIES:
        found = list(mapped(partial(exactness.run, entropy, "", phases, _CHOSEN), range(runs)))
        stopped, warned = (
            sum(o.stopped_after is not None for o in found),
            sum(o.warned_after is not None for o in found),
        )
        above = [sum(o.highest >= level for o in found) for level in (2, 3)]
        out.rows.append((f"{entropy} nats", str(runs), str(phases), str(stopped), *map(str, above), str(warned)))
        out.hold(
            stopped == warned == 0, f"{entropy} nats: {stopped} of {runs} correct runs stopped, {warned} warned of"
        )
        at_most = 0.01 * runs + 3 * (0.01 * runs) ** 0.5
        out.hold(above[0] <= at_most, f"{entropy} nats: {above[0]} of {runs} correct runs above a level of 1e-2")
    return out


def wrong_engines(mapped: Map, runs: int, phases: int) -> Shown:
    """Engines that do not: fewer runs, each ten times as long at most."""
    of, long = max(1, runs // _WRONG), 10 * phases
    kinds = [
        (f"{nats} nats{name}", nats, options) for nats in exactness.ENTROPIES for name, options in exactness.FAULTS
    ]
    out = Shown(
        f"Evidence of exact sampling, wrong engines: thousands of chosen tokens until the run stops, median of {of} runs (-: "
        f"more than {long * _CHOSEN // 1000}); where stated alike, until the line",
        ("engine", *(name for name, *_ in kinds)),
    )
    for engine in exactness.ENGINES:
        cells = []
        for _, nats, options in kinds:
            found = list(
                mapped(partial(exactness.run, nats, engine, long, _CHOSEN, **options), range(10_000, 10_000 + of))
            )
            after = statistics.median(o.noticed_after for o in found) / 1000
            cells.append("-" if after == float("inf") else f"{after:.0f}")
            bound = float("inf") if options else _STOPPED.get(engine, float("inf"))
            out.hold(after <= bound, f"{engine}, {nats} nats: {after:.0f}k tokens, at most {bound}k are stated")
        out.rows.append((engine, *cells))
    return out


def selections(mapped: Map, runs: int, phases: int) -> Shown:
    """Right engines, and which of their tokens count: fewer runs, half as long."""
    of, phases = max(1, runs // _SELECTED), max(1, phases // 2)
    out = Shown(
        "Evidence of exact sampling, right engines, by which tokens count",
        (
            "tokens that count",
            "what follows them is",
            "runs",
            "phases of each",
            "stopped",
            "median of those, thousands of tokens",
        ),
    )
    for name, (fair, _) in exactness.SELECTIONS.items():
        found = list(mapped(partial(exactness.select, name, phases, 256), range(of)))
        after = [o.stopped_after / 1000 for o in found if o.stopped_after is not None]
        median = f"{statistics.median(after):.0f}" if after else ""
        out.rows.append((name, "not looked at" if fair else "looked at", str(of), str(phases), str(len(after)), median))
        out.hold(not (fair and after), f"{name}: {len(after)} of {of} correct runs were stopped")
    return out


def of_the_draft(mapped: Map, runs: int, phases: int) -> Shown:
    """What statistics of the draft's distribution would add: fewer runs, each ten times as long at most."""
    of, long = max(1, runs // _SELECTED), 10 * phases
    kinds = [(nats, drafts) for nats in exactness.ENTROPIES for drafts in (False, True)]
    out = Shown(
        f"Evidence of exact sampling, with two statistics of the draft's distribution: thousands of chosen tokens until the run "
        f"stops, median of {of} runs (-: more than {long * _CHOSEN // 1000})",
        ("engine", *(f"{nats} nats, {'with' if drafts else 'without'}" for nats, drafts in kinds)),
    )
    for name in drafts_law.KINDS:
        cells = []
        for nats, drafts in kinds:
            work = partial(drafts_law.tokens_until_refused, nats, name, drafts, long, _CHOSEN)
            after = statistics.median(mapped(work, range(of)))
            cells.append("-" if after == float("inf") else f"{after / 1000:.0f}")
            out.hold(bool(name) or after == float("inf"), f"{nats} nats: a right engine was stopped")
        out.rows.append((name or "right", *cells))
    return out
