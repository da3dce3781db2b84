"""The utilities of EngineCore: a table of k is taken whole or not at all; a draft is paused in all workers, or does not count."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from spec_plugin.engine.vllm.schedule import channel, utilities
from spec_plugin.engine.vllm.schedule.pairs import PairedSteps
from spec_plugin.engine.vllm.schedule.utilities import check_table, spec_pause, spec_set_schedule


def test_a_table_has_a_k_for_each_batch_size_within_what_the_engine_can_draft():
    assert check_table((0, 3, 2, 0), 4, 3) == [0, 3, 2, 0]


@pytest.mark.parametrize(
    "table", [(0, 3, 2), (0, 4, 2, 0), (0, -1, 2, 0), (0, 3.0, 2, 0), (0, True, 2, 0), "0320", None]
)
def test_any_other_is_refused(table):
    with pytest.raises(ValueError, match="schedule"):
        check_table(table, 4, 3)


@pytest.mark.parametrize(
    ("asked", "done", "paused"),
    [(True, [True, True], True), (True, [True, False], False), (False, [True, True], False)],
)
def test_law_7_a_draft_is_paused_when_every_worker_has_left_it_out(asked, done, paused):
    """Else its steps would be timed as plain ones."""
    executor = SimpleNamespace(collective_rpc=lambda method, args: done)
    core = SimpleNamespace(model_executor=executor, scheduler=SimpleNamespace(spec_paused=None))
    assert spec_pause(core, asked) is paused and core.scheduler.spec_paused is paused


def a_core(lookup: list[int] | None) -> Any:
    scheduler = SimpleNamespace(dynamic_sd_lookup=lookup, num_spec_tokens=3, spec_pairs=PairedSteps())
    return SimpleNamespace(scheduler=scheduler, model_executor="the executor")


def test_a_table_is_written_into_the_one_that_vllm_reads_and_the_cut_off_writes_there_too():
    lookup = [3, 3, 3, 3]
    core = a_core(lookup)
    assert spec_set_schedule(core, [0, 2, 1, 0], [1.0, 9.0, 9.0, 9.0], 0.25)["table"] == [0, 2, 1, 0] == lookup
    assert core.scheduler.spec_pairs.share == 0.25
    cutoff = core.scheduler.spec_cutoff
    while not cutoff.due:
        cutoff.emitted(2, 1)
    assert cutoff.drop() and lookup == [0] * 4
    assert core.scheduler.spec_executor == "the executor", "by which a draft that is dropped is paused"


@pytest.mark.parametrize(
    ("table", "break_even", "reason"), [([3], [], "4 entries"), ([0, 3, 3, 3], [1.0], "break_even must have 4 entries")]
)
def test_a_bad_call_changes_nothing(table, break_even, reason):
    core = a_core([0, 1, 1, 1])
    with pytest.raises(ValueError, match=reason):
        spec_set_schedule(core, table, break_even)
    assert core.scheduler.dynamic_sd_lookup == [0, 1, 1, 1] and not hasattr(core.scheduler, "spec_cutoff")


def test_an_engine_without_a_dynamic_schedule_says_what_it_was_built_without():
    with pytest.raises(ValueError, match="num_speculative_tokens_per_batch_size"):
        spec_set_schedule(a_core(None), [0, 1, 1, 1])


def test_what_the_channel_calls_is_what_is_put_on_engine_core_and_no_more(monkeypatch):
    class Core:
        pass

    before = set(vars(Core))
    monkeypatch.setattr(utilities, "EngineCore", Core)
    utilities.add_utilities()
    called = set(re.findall(r'_call\(engine, "(\w+)"', inspect.getsource(channel)))
    assert set(vars(Core)) - before == called and len(called) == 8
