"""Law 6 in one table: every call that session and control make, every kind of failure, and what must happen.

The session, the control and the built-in plugins are real; the link is not, since engines do not fail on demand.
"""

from __future__ import annotations

import logging
import math
import os
import random
from asyncio import CancelledError
from collections.abc import Callable
from typing import Any

import pytest
from builders.law6_faults import (
    ANSWERS,
    LINK_CALLS,
    NO_HOOKS,
    OFF,
    ON,
    RAISED,
    STOPS,
    TIME_OUT,
    USUAL,
    FakeLink,
    Fault,
    RemoteError,
    UnprintableError,
    listen,
    make,
    steps,
)

from spec_plugin import LogprobProvenanceError, LosslessError, SpecConfigError, hookimpl
from spec_plugin.trainer import engine_control as control_module

#: call -> what must happen after an answer of a wrong type, None, and one with NaN in it
TABLE: dict[str, tuple[str, str, str]] = {
    # what nobody reads does not matter
    "spec_engine_ready": (ON, ON, ON),
    "spec_rollout_start": (ON, ON, ON),
    "spec_rollout_end": (ON, ON, ON),
    "spec_target_forward": (ON, ON, ON),
    "spec_train_draft": (ON, ON, ON),
    "spec_weight_sync": (ON, ON, ON),
    "spec_recover": (ON, ON, ON),
    "spec_refreshed": (ON, ON, ON),
    "spec_save": (ON, ON, ON),
    "spec_load": (ON, ON, ON),
    # None is "no opinion"
    "spec_draft_weights": (OFF, ON, OFF),
    "spec_schedule": (OFF, ON, OFF),
    "spec_head_start": (OFF, ON, OFF),
    "spec_can_pay": (OFF, ON, OFF),
    "spec_slowdown_without_drafts": (ON, ON, ON),  # what is no number is left out of the log
    # what is no hook: the method's memory, and the kit's ear
    "memory.keep": (ON, ON, ON),
    "memory.recall": (OFF, OFF, OFF),
    "auditor": (ON, ON, ON),
    # a metric that is none is left out
    "spec_metrics": (ON, ON, ON),
    # the engines
    "link.install": (OFF, OFF, OFF),
    "link.set_schedule": (OFF, OFF, ON),  # NaN is not 0: drafts
    "link.self_test": (OFF, OFF, ON),  # NaN seconds of a test that passed are no reason for anything
    "link.start_phase": (ON, ON, ON),
    "link.stats": (OFF, OFF, ON),  # its numbers end in metrics, which are left out
    "link.share_rollouts": (OFF, OFF, OFF),
    "link.remember": (ON, ON, ON),
    "link.spans": (OFF, OFF, OFF),
    "link.state": (OFF, OFF, ON),
}
#: bookkeeping on which no draft depends: a failure is a warning
NOTED = {"spec_metrics", "spec_save"}
#: before anything has started, and before log-probs enter the loss, every failure stops the run
STRICT: dict[str, tuple[str, str, str]] = {
    "spec_method": (STOPS, ON, STOPS),
    "spec_configure": (ON, ON, ON),
    "spec_check_logprobs": (ON, ON, ON),
    "spec_check_stated": (ON, ON, ON),
}


def cells(table: dict[str, tuple[str, str, str]], always: str = "") -> list[tuple[Fault, str]]:
    off = {call: always or (ON if call in NOTED else OFF) for call in table}
    found = [
        (Fault(call, kind), off[call] if must == OFF else must) for call in table for kind, (_, must) in RAISED.items()
    ]
    found += [(Fault(call, TIME_OUT), off[call]) for call in table]
    return found + [
        (Fault(call, kind), must) for call, row in table.items() for kind, must in zip(ANSWERS, row, strict=True)
    ]


def named(cell: object) -> str:
    return f"{cell.call}: {cell.kind}" if isinstance(cell, Fault) else str(cell)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(control_module, "_START", -5.0)  # five times self_test_seconds and this


@pytest.fixture
def said(caplog) -> Callable[[str], list[str]]:
    caplog.set_level(logging.WARNING, logger="spec_plugin")
    return lambda words: [r.getMessage() for r in caplog.records if words in r.getMessage()]


@pytest.mark.parametrize("overlaps", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize(("fault", "must"), cells(TABLE) + cells(STRICT, STOPS), ids=named)
def test_law_6_each_failure_of_each_call_does_what_the_table_says(fault, must, overlaps, tmp_path, said):
    link = FakeLink(fault)
    if must == STOPS:
        with pytest.raises(
            (LosslessError, LogprobProvenanceError, SpecConfigError, KeyboardInterrupt, SystemExit)
        ) as got:
            try:
                list(steps(make(fault, link, overlaps, self_test_seconds=1.0), tmp_path))
            except (RuntimeError, MemoryError, UnprintableError, RemoteError, TimeoutError, CancelledError) as error:
                if fault.call not in STRICT:  # those pass everything on as it is
                    raise
                raise SystemExit from error
        assert not isinstance(got.value, RemoteError) and not said("speculation is off")
        return
    control = make(fault, link, overlaps, self_test_seconds=1.0)
    logged = list(steps(control, tmp_path))
    assert len(logged) == 3 and all(math.isfinite(v) for values in logged for v in values.values())
    assert control.session.failed == (must == OFF), control.session.failure
    assert len(said("speculation is off")) == (must == OFF), said("speculation is off")
    assert logged[-1]["spec/failed"] == (must == OFF) and logged[-1]["spec/on"] == control.session.speculating
    confirmed = fault.call != "link.set_schedule"
    assert must == ON or not confirmed or not any(link.table), "the engines were told to draft nothing"
    assert fault.kind != "NaN" or fault.call != "spec_metrics" or len(said("plugin broken, metric spec/mine")) == 1


def test_the_table_names_every_hook_and_every_call_of_the_link():
    from spec_plugin.api import hookspecs
    from spec_plugin.api.method import Memory

    hooks = {name for name in vars(hookspecs) if name.startswith("spec_")}
    calls = {f"link.{name}" for name in LINK_CALLS}
    memory = {f"memory.{name}" for name in vars(Memory) if not name.startswith("_")}
    assert memory < {*NO_HOOKS} and hooks | calls | {*NO_HOOKS} == {*TABLE, *STRICT}


def test_the_walk_makes_every_call_of_the_table(tmp_path):
    """Else a cell would prove nothing."""
    heard: set[str] = set()

    class Listening:
        pass

    for call in (c for c in TABLE if c.startswith("spec_")):
        setattr(Listening, call, hookimpl(tryfirst=True)(lambda self, call=call: heard.add(call)))
    control = make(Fault())
    control.session.manager.register(Listening())
    for call in NO_HOOKS:
        listen(control.session, call, lambda call=call: heard.add(call) or USUAL)
    list(steps(control, tmp_path))
    assert isinstance(control.link, FakeLink)
    assert heard | {f"link.{call}" for call in control.link.calls} == set(TABLE)


# ---- all of it at once, at random


class AtRandom(FakeLink):
    """Any call may fail in any way that does not stop the run."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__(Fault())
        self.dice = dice

    async def _answer(self, name: str, good: Any) -> Any:
        answer = await super()._answer(name, good)
        fault = drawn(self.dice, f"link.{name}")
        return answer if fault is None else await fault.remote_answer()


def drawn(dice: random.Random, call: str) -> Fault | None:
    kinds = [kind for kind, (_, must) in RAISED.items() if must == OFF] + [*ANSWERS, TIME_OUT]
    return Fault(call, dice.choice(kinds)) if dice.random() < 0.03 else None


def test_law_6_four_hundred_steps_of_random_faults_stop_nothing_and_leave_nothing_behind(tmp_path, capsys):
    seed = random.SystemRandom().randrange(10**6)
    dice = random.Random(seed)
    with capsys.disabled():
        print(f" seed {seed}", end="")
    link = AtRandom(dice)
    control = make(Fault(), link, self_test_seconds=1.0)
    plugin = type("Random", (), {})
    for call in (c for c in TABLE if c.startswith("spec_")):

        def hook(self: object, call: str = call) -> Any:
            fault = drawn(dice, call)
            return None if fault is None else fault.answer()

        setattr(plugin, call, hookimpl(tryfirst=True)(hook))
    control.session.manager.register(plugin(), name="random")
    for call in NO_HOOKS:
        listen(control.session, call, lambda call=call: USUAL if (f := drawn(dice, call)) is None else f.answer())
    files: list[int] = []
    drafted = failed = 0
    for number, logged in enumerate(steps(control, tmp_path, 400)):
        assert all(math.isfinite(value) for value in logged.values())
        drafted, failed = drafted + control.session.speculating, failed + control.session.failed
        if number % 100 == 99:
            files.append(len(os.listdir("/proc/self/fd")))
        if control.session.failed and dice.random() < 0.5:
            control.session.failure = None  # a run would stay plain, and show no more
    assert 40 < drafted < 400 and 40 < failed < 400, f"seed {seed}: {drafted} drafted, {failed} failed"
    assert files[-1] <= files[0], f"seed {seed}: open files {files}"
