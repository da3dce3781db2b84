"""``make guards``: simulated runs with known truth under each guard, hundreds of each kind, and the bounds that are stated.

Exit code 1 if a bound does not hold. ``--markdown`` prints the tables of docs/guards.md and docs/explain/controller.md.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, Protocol

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from simulators import controller, evidence, guard, numbers, rules, selftest, waiting, wrong_rows
from simulators.shown import Map, Shown


class _Limited(Protocol):
    """A kind of run that may have fewer runs, and shorter ones, than are asked for."""

    @property
    def runs(self) -> int | None: ...

    @property
    def phases(self) -> int | None: ...


def _most(seen: int, of: int) -> float:
    """Upper end of the 95 % interval of a chance that showed itself so often (the rule of three, where it never did)."""
    return 3.0 / of if seen == 0 else (seen + 1.645 * seen**0.5 + 1.645**2) / of


def _as_asked(kind: _Limited, runs: int, phases: int) -> tuple[int, int]:
    """Runs and phases of a kind: as many as are asked for, unless it has fewer."""
    return min(runs, kind.runs or runs), min(phases, kind.phases or phases)


def correct_guard(
    mapped: Map, runs: int, phases: int, settings: Sequence[guard.Setting] = (*guard.SETTINGS, *guard.AT_SCALE)
) -> Shown:
    """Correct runs under the provenance guard."""
    out = Shown(
        "Provenance guard, correct runs",
        (
            "kind of run",
            "runs",
            "phases of each",
            "stopped",
            "phases with an alarm",
            "chance of a stop in a phase, at most",
        ),
    )
    for setting in settings:
        of, long = _as_asked(setting, runs, phases)
        found = list(mapped(partial(guard.run, setting, phases=long), range(of)))
        stopped, alarms = sum(o.false_stop for o in found), sum(o.alarms for o in found)
        at_most = f"{_most(stopped, of * long):.1e}"
        out.rows.append((setting.name, str(of), str(long), str(stopped), str(alarms), at_most))
        out.hold(stopped == 0, f"{setting.name}: {stopped} of {of} correct runs were stopped")
        out.hold(alarms <= max(1, of * long // 20_000), f"{setting.name}: {alarms} false alarms")
    return out


def guard_rules(*_: object) -> Shown:
    """By what the provenance guard judges."""
    return Shown("Provenance guard, what is refused", rules.HEAD, list(rules.rows()))


def guard_floors(*_: object) -> Shown:
    """The nats in its rules."""
    return Shown(
        "Floors at temperature 1, by the coarser dtype of engine and actor", rules.FLOOR_HEAD, list(rules.floors())
    )


def guard_words(*_: object) -> Shown:
    """The words in its rules."""
    return Shown("Words", rules.WORD_HEAD, list(rules.words()))


#: of wrong runs, those that must be stopped, by setting and fault; what is not named has none
_MUST_NOTICE = {"0.4 nats a token": 0.97, "0.8 nats a token": 0.99, "noise six times as large": 0.9}


def wrong_guard(
    mapped: Map, runs: int, phases: int, settings: Sequence[guard.Setting] = (*guard.SETTINGS, *guard.AT_SCALE)
) -> Shown:
    """Runs that become wrong: a third as many, and half as long, of each kind and fault."""
    return _wrong(mapped, runs // 3, phases // 2, settings, guard.FAULTS, _MUST_NOTICE)


def late_guard(mapped: Map, runs: int, phases: int) -> Shown:
    """The same of runs with long texts, of which only the last two fifths are wrong."""
    return _wrong(
        mapped, runs // 3, phases // 2, guard.AT_SCALE, guard.LATE, {}, ", in the last 40 % of long texts alone"
    )


#: share of the runs with 8 or more of 64 rows wrong that must be stopped within ten wrong phases
_ROWS_NOTICED = 0.95


def few_rows(mapped: Map, runs: int, phases: int) -> Shown:
    """Runs in which some rows of each batch are wrong, with the evidence of rows that adds up and without: a seventh as many.

    A tenth of these with long texts, of which a phase has a million tokens.
    """
    out = Shown(
        f"Provenance guard, some rows of 64 wrong in each phase: stopped within {wrong_rows.WITHIN} of these, median phase",
        ("wrong rows", "tokens of each", "evidence", "runs", *(name for name, _ in wrong_rows.FAULTS)),
    )
    kinds = [(wrong, adds_up, 1) for wrong in (4, 8, 16) for adds_up in (False, True)]
    for wrong, adds_up, times in (*kinds, (8, False, wrong_rows.LONG), (8, True, wrong_rows.LONG)):
        cells, of = [], max(1, runs // (7 if times == 1 else 70))
        for index, (name, _) in enumerate(wrong_rows.FAULTS):
            of_fault = partial(wrong_rows.run, wrong, index, adds_up=adds_up, times=times)
            after = [phase for phase in mapped(of_fault, range(10_000, 10_000 + of)) if phase is not None]
            cells.append(f"{len(after) / of:.0%}, {statistics.median(after):.0f}" if after else "0%")
            must = _ROWS_NOTICED * (adds_up and wrong >= 8)
            out.hold(len(after) >= must * of, f"{wrong} wrong rows, {name}: {len(after)} of {of} runs stopped")
        evidence = "adds up over phases" if adds_up else "of each phase"
        out.rows.append((str(wrong), f"{times * wrong_rows.TOKENS:,}", evidence, str(of), *cells))
    return out


#: rounding of rows: name, log-scale by which it differs, and the part of it that is common to the tokens of a row
_ROUNDINGS = (
    ("rows differ by a log-scale of 0.5", 0.5, 0.0),
    ("of 1.0", 1.0, 0.0),
    ("of 0.5, and a tenth has a row's own direction", 0.5, 0.1),
    ("of 1.0, and a tenth has a row's own direction", 1.0, 0.1),
)


def rows_capital(mapped: Map, runs: int, phases: int) -> Shown:
    """What the bet on wrong rows comes to in correct runs, whatever their rounding is like."""
    levels = (1e-2, 1e-7)
    out = Shown(
        "Provenance guard, the bet on wrong rows in correct runs",
        (
            "rounding",
            "runs",
            "phases of each",
            "largest capital",
            *(f"stopped at {level:g} a phase" for level in levels),
        ),
    )
    for name, spread, towards in _ROUNDINGS:
        capital = list(mapped(partial(wrong_rows.highest, phases=phases, spread=spread, towards=towards), range(runs)))
        stopped = [sum(most >= 1 / level for most in capital) for level in levels]
        out.rows.append((name, str(runs), str(phases), f"{max(capital):.3g}", *map(str, stopped)))
        out.hold(stopped[-1] == 0, f"{name}: {stopped[-1]} of {runs} correct runs were stopped by their rows")
        out.hold(stopped[0] <= levels[0] * phases * runs, f"{name}: {stopped[0]} of {runs} at {levels[0]:g} a phase")
    return out


def _wrong(
    mapped: Map,
    runs: int,
    phases: int,
    settings: Sequence[guard.Setting],
    faults: Sequence[tuple[str, guard.Fault]],
    bounds: Mapping[str, float],
    where: str = "",
) -> Shown:
    """Runs that become wrong; of each fault the share that must be stopped, where there is a bound."""
    out = Shown(
        f"Provenance guard, runs that become wrong{where}: stopped, in the median after so many wrong phases",
        ("kind of run", "runs", "phases of each", *(name for name, _ in faults)),
    )
    for setting in settings:
        of, long = _as_asked(setting, max(1, runs), max(8, phases))
        cells = []
        for name, fault in faults:
            found = list(mapped(partial(guard.run, setting, phases=long, fault=fault), range(10_000, 10_000 + of)))
            after = [o.noticed_after for o in found if o.noticed_after is not None]
            share = len(after) / of
            cells.append(f"{share:.0%}, {statistics.median(after):.0f}" if after else "0%")
            bound = bounds.get(name, 0.0)
            out.hold(share >= bound, f"{setting.name}, {name}: {share:.0%} noticed, at least {bound:.0%} is stated")
        out.rows.append((setting.name, str(of), str(long), *cells))
    return out


def self_tests(mapped: Map, runs: int, phases: int, wide: bool = False) -> Shown:
    """Engines under the self-test."""
    vocabulary = selftest.WIDE if wide else selftest.V
    out = Shown(
        f"Self-test, {selftest.N * selftest.PROMPTS} sequences an arm, a vocabulary of {vocabulary:,}, what becomes of an engine",
        ("engine", "runs", "refused", "with the same mistake in plain requests: refused", "named unproven"),
    )
    found = list(mapped(partial(_selftest, None, False, selftest.ALPHA, wide), range(runs)))
    refused, unproven = sum(v.failed for v in found), sum(v.unproven for v in found)
    out.rows.append(("right", str(runs), str(refused), "", str(unproven)))
    out.hold(refused == unproven == 0, f"{refused} of {runs} right engines refused, {unproven} unproven")
    level = 0.05
    at_level = sum(v.failed for v in mapped(partial(_selftest, None, False, level, wide), range(runs)))
    out.rows.append((f"right, at an error level of {level:.0%}", str(runs), str(at_level), "", ""))
    slack = 3 * (level * (1 - level) * runs) ** 0.5
    out.hold(at_level <= level * runs + slack, f"at {level:.0%}, {at_level} of {runs} right engines refused")
    for index, (name, _) in enumerate(selftest.MISTAKES):
        wrong = list(mapped(partial(_selftest, index, False, selftest.ALPHA, wide), range(10_000, 10_000 + runs)))
        both = list(mapped(partial(_selftest, index, True, selftest.ALPHA, wide), range(10_000, 10_000 + runs)))
        seen = sum(v.failed for v in wrong)
        shares = (seen, sum(v.failed for v in both), sum(v.unproven for v in both))
        out.rows.append((name, str(runs), *(f"{n / runs:.0%}" for n in shares)))
        out.hold(index not in (0, 2, 5) or seen >= 0.97 * runs, f"{name}: {seen} of {runs} refused")
    return out


def wide_self_tests(mapped: Map, runs: int, phases: int) -> Shown:
    """Engines of models with a real vocabulary under the self-test: a tenth as many, since each takes seconds."""
    return self_tests(mapped, max(1, runs // 10), phases, wide=True)


def _selftest(index: int | None, everywhere: bool, alpha: float, wide: bool, seed: int) -> selftest.Verdict:
    mistake = None if index is None else selftest.MISTAKES[index][1]
    return selftest.run(seed, mistake, everywhere, alpha, wide)


def controllers(
    mapped: Map, runs: int, phases: int, truths: Sequence[controller.Truth] = (*controller.TRUTHS, *controller.AT_SCALE)
) -> Shown:
    """Runs under the break-even controller: a third as many, since each takes seconds."""
    out = Shown(
        "Break-even controller; median of the runs (worst run)",
        (
            "draft",
            "runs",
            "phases of each",
            "seconds against plain",
            "of the worst 50 phases in a row",
            "against the best k of each phase, from the tenth on",
            "phases with something to gain",
            "of them plain",
            "most of those in a row",
            "phases more than 3 % slower than plain",
            "steps plain only to be compared",
            "phases with draft work",
        ),
    )
    for truth in truths:
        of, long = _as_asked(truth, max(1, runs // 3), phases)
        found = list(mapped(partial(controller.run, truth, phases=long), range(of)))
        ratios = [o.ratio for o in found]
        seconds = (_median_and_most([getattr(o, name) for o in found], ".3f") for name in ("ratio", "worst", "regret"))
        counts = (_median_and_most([getattr(o, name) for o in found], ".0f") for name in ("missed", "waited", "slower"))
        worth = f"{statistics.median(o.worth for o in found):.0f}"
        paired = _median_and_most([o.paired for o in found], ".1%")
        worked = _median_and_most([o.worked for o in found], ".0%") if truth.trains else ""
        out.rows.append((truth.name, str(of), str(long), *seconds, worth, *counts, paired, worked))
        told = [o.told for o in found]
        out.hold(
            min(told) >= 0.85 and max(told) <= truth.told_at_most,
            f"{truth.name}: the time without drafts was told as {min(told):.2f} to {max(told):.2f} of the true one",
        )
        took, waited = max(ratios), max(o.waited for o in found)
        out.hold(
            took <= truth.at_most,
            f"{truth.name}: a run took {took:.3f} of a plain one, at most {truth.at_most} is stated",
        )
        out.hold(
            waited <= truth.waits,
            f"{truth.name}: {waited} phases missed in a row, at most {truth.waits} are stated",
        )
        late = max(o.work_late for o in found)
        out.hold(
            truth.works is None or late <= truth.works,
            f"{truth.name}: draft work in {late:.0%} of the second half, at most {truth.works} is stated",
        )
    return out


#: share of an asynchronous phase that the trainer would wait for without drafts, from which they must go on
_EXPOSED = 0.1
#: share of the runs of a kind that may lose drafts for which the trainer would have waited, of their phases a fifth of that
_WRONGLY = 0.05


def waitings(
    mapped: Map, runs: int, phases: int, settings: Sequence[waiting.Setting] = (*waiting.SETTINGS, *waiting.AT_SCALE)
) -> Shown:
    """Asynchronous trainers, most of whose steps mix requests with drafts and without: a third as many runs, of fewer phases."""
    out = Shown(
        "Asynchronous trainers; least to most of the runs",
        (
            "trainer",
            "runs",
            "phases of each",
            "of a phase without drafts it would wait for",
            "steps not alike",
            "found hidden, runs",
            "in the median after so many phases",
            "phases without drafts",
            "time without drafts, told over true",
        ),
    )
    for setting in settings:
        of, long = _as_asked(setting, max(1, runs // 3), max(20, phases // 4))
        found = list(mapped(partial(waiting.run, setting, phases=long), range(of)))
        after = [o.first + 1 for o in found if o.first is not None]
        exposed, told = ([getattr(o, name) for o in found] for name in ("exposed", "told"))
        spans = f"{min(exposed):.0%}-{max(exposed):.0%}", f"{statistics.median(o.mixed for o in found):.0%}"
        noticed = f"{len(after) / of:.0%}", f"{statistics.median(after):.0f}" if after else ""
        off = f"{statistics.mean(o.hidden for o in found) / long:.0%}"
        out.rows.append((setting.name, str(of), str(long), *spans, *noticed, off, f"{min(told):.2f}-{max(told):.2f}"))
        wrongly = [o.hidden for o in found if o.exposed >= _EXPOSED and o.hidden]
        out.hold(
            len(wrongly) <= _WRONGLY * of and sum(wrongly) <= _WRONGLY / 5 * of * long,
            f"{setting.name}: {len(wrongly)} of {of} runs lost drafts that the trainer waits for, in {sum(wrongly)} phases",
        )
        late = [o for o in found if setting.noticed and (o.first is None or o.first >= setting.noticed)]
        out.hold(len(late) <= 0.1 * of, f"{setting.name}: {len(late)} of {of} are not noticed in {setting.noticed}")
        out.hold(
            max(told) <= 1.3, f"{setting.name}: the time without drafts was told as {max(told):.2f} of the true one"
        )
        out.hold(min(o.known for o in found) == 1.0, f"{setting.name}: what drafts have saved is not known")
    return out


def _median_and_most(values: Sequence[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({max(values):{form}})"


PARTS: dict[str, tuple[Callable[[Map, int, int], Shown], ...]] = {
    "rules": (guard_rules, guard_floors, guard_words),
    "guard": (correct_guard, wrong_guard, late_guard),
    "rows": (few_rows, rows_capital),
    "selftest": (self_tests, wide_self_tests),
    "exactness": (evidence.right_engines, evidence.wrong_engines, evidence.selections, evidence.of_the_draft),
    "controller": (controllers,),
    "waiting": (waitings,),
}
#: what is run only where it is asked for: an hour, and nothing that must hold
ASKED_FOR = {"numbers": (numbers.numbers,)}


def _quiet() -> None:
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)


def as_markdown(shown: Shown) -> str:
    """For docs/guards.md and docs/explain/controller.md."""
    rows = [shown.head, tuple("---" for _ in shown.head), *shown.rows]
    return "\n".join([f"{shown.title}:", "", *(f"| {' | '.join(row)} |" for row in rows)])


def as_table(shown: Shown) -> Table:
    """For a terminal."""
    table = Table(title=shown.title, title_justify="left")
    for name in shown.head:
        table.add_column(name, justify="left" if name == shown.head[0] else "right")
    for row in shown.rows:
        table.add_row(*row)
    return table


def main() -> int:
    """Parse, run, show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", choices=[*PARTS, *ASKED_FOR], action="append", help="this guard alone; may be repeated"
    )
    parser.add_argument("--runs", type=int, default=300, help="of each kind (default: %(default)s)")
    parser.add_argument("--phases", type=int, default=200, help="of each run (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    parser.add_argument("--markdown", action="store_true", help="tables as in docs")
    asked = parser.parse_args()
    console, broken = Console(), []
    with ProcessPoolExecutor(asked.jobs, initializer=_quiet) as pool:
        for part in asked.only or PARTS:
            for simulate in (PARTS | ASKED_FOR)[part]:
                with Progress(console=Console(stderr=True), transient=True) as bars:
                    task = bars.add_task(simulate.__name__, total=None)

                    def mapped(work: Callable[[int], Any], seeds: Sequence[int]) -> Iterable[Any]:
                        for found in pool.map(work, seeds, chunksize=4):
                            bars.advance(task)  # noqa: B023  (called within this turn of the loop)
                            yield found

                    began = time.monotonic()
                    shown = simulate(mapped, asked.runs, asked.phases)
                seconds = time.monotonic() - began
                if asked.markdown:
                    print(as_markdown(shown) + "\n", flush=True)
                else:
                    console.print(as_table(shown), f"{seconds:.0f} s\n")
                broken += shown.broken
    for what in broken:
        console.print(f"does not hold: {what}", style="red")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
