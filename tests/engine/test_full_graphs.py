"""``spec.full_graphs`` in a real engine: k changes by a table of our scheduler's own, of which vLLM's config knows nothing."""

from __future__ import annotations

from typing import Any

import pytest
import small

from spec_plugin.engine.schedule.scheduler import SCHEDULER

pytestmark = [pytest.mark.engine, pytest.mark.v1("V2 has full graphs anyway")]


@pytest.fixture(scope="module")
def own_table(target, config, tmp_path_factory) -> Any:
    from draft_training import save_draft

    folder = tmp_path_factory.mktemp("drafts") / "good"
    save_draft(folder, config, small.good_tensors(config))
    return small.start_engine(
        target, folder, scheduler_cls=SCHEDULER, additional_config={"spec_plugin": {"own_table": True}}
    )


@pytest.mark.parametrize("k", [3, 2, 1, 0, 3])
def test_k_follows_the_table_and_text_is_the_targets(own_table, greedy_reference, k):
    from spec_plugin.engine.schedule.counters import read_spec_counters

    assert own_table.llm_engine.vllm_config.speculative_config.num_speculative_tokens_per_batch_size is None
    core = own_table.llm_engine.engine_core.engine_core
    assert core.spec_schedule_state() == {"table": core.scheduler.dynamic_sd_lookup}
    core.spec_set_schedule([k] * len(core.scheduler.dynamic_sd_lookup))
    before = read_spec_counters()
    assert small.greedy(own_table) == greedy_reference
    after = read_spec_counters()
    rounds, tokens = (after[name] - before[name] for name in ("drafts", "draft_tokens"))
    assert tokens == rounds * k and bool(rounds) == bool(k)
