"""A table of k is taken whole or not at all; a draft is paused in all workers or in none that counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from spec_plugin.engine.schedule.scheduler import check_table, spec_pause


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
    core = SimpleNamespace(model_executor=executor, scheduler=SimpleNamespace(draft_paused=None))
    assert spec_pause(core, asked) is paused and core.scheduler.draft_paused is paused
