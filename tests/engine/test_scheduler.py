"""The control channel on a real engine: k changes at run time, single requests stay plain, bad calls change nothing."""

from __future__ import annotations

import asyncio

import pytest
import runner

pytest.importorskip("vllm")

from live import MAX_NUM_SEQS, K, live_engine, prompts

from spec_plugin.api.errors import PatchError
from spec_plugin.engine.vllm.schedule import scheduler as scheduler_module
from spec_plugin.engine.vllm.schedule.channel import (
    pause_idle_draft,
    schedule_state,
    set_schedule,
    take_pairs,
    take_steps,
)
from spec_plugin.engine.vllm.schedule.counters import read_spec_counters
from spec_plugin.engine.vllm.schedule.plain import PLAIN
from spec_plugin.engine.vllm.schedule.scheduler import verify
from spec_plugin.engine.vllm.schedule.utilities import UTILITIES, check_table

TABLE = [K] * (MAX_NUM_SEQS + 1)


def test_a_table_that_does_not_fit_is_refused_with_the_reason():
    assert check_table([0, 3, 1], 3, 3) == [0, 3, 1]
    for table, reason in [
        ([3], "3 entries, got 1"),
        ([0, 4, 1], r"ints in 0\.\.3.*\(1, 4\)"),
        ([0, -1, 1], r"\(1, -1\)"),
        ([0, 1.0, 1], r"\(1, 1.0\)"),
        ([0, True, 1], r"\(1, True\)"),
        ("abc", "got str"),
    ]:
        with pytest.raises(ValueError, match=reason):
            check_table(table, 3, 3)


def test_importing_the_module_leaves_vllm_as_it_was():
    from vllm.v1.engine.core import EngineCore

    assert not [utility for utility in UTILITIES if hasattr(EngineCore, utility.__name__)]


def test_a_vllm_without_the_mechanism_is_refused_loudly(monkeypatch):
    verify()

    class Changed(scheduler_module.Scheduler):
        def schedule(self):
            return None

    monkeypatch.setattr(scheduler_module, "Scheduler", Changed)
    with pytest.raises(PatchError, match=r"Scheduler\.dynamic_sd_lookup is gone or changed"):
        verify()


async def _generate(engine, name, plain=lambda i: False, tokens=24):
    from vllm import SamplingParams

    async def one(i, prompt):
        extra = {"extra_args": PLAIN} if plain(i) else {}
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **extra)
        async for output in engine.generate({"prompt_token_ids": prompt}, params, request_id=f"{name}-{i}"):
            last = output
        return list(last.outputs[0].token_ids)

    before = read_spec_counters()
    outputs = await asyncio.gather(*[one(i, p) for i, p in enumerate(prompts())])
    after = read_spec_counters()
    return outputs, {n: after[n] - before[n] for n in ("drafts", "draft_tokens")}


@pytest.mark.engine
def test_k_follows_the_table_and_greedy_output_does_not():
    live = live_engine()
    reference, did = live.run(_generate(live.engine, "reference"))
    assert did["drafts"] > 0
    for k in (0, 1, 2, 3, 0):
        state = live.run(set_schedule(live.engine, [k] * (MAX_NUM_SEQS + 1)))
        assert state["table"] == [k] * (MAX_NUM_SEQS + 1)
        outputs, did = live.run(_generate(live.engine, f"k{k}"))
        assert outputs == reference
        assert (did["drafts"] > 0) == (k > 0)
        assert did["draft_tokens"] <= k * did["drafts"]
    live.run(set_schedule(live.engine, TABLE))


@pytest.mark.engine
def test_k_may_change_while_requests_run():
    live = live_engine()

    async def toggle():
        reference, _ = await _generate(live.engine, "still", tokens=64)
        running = asyncio.ensure_future(_generate(live.engine, "toggled", tokens=64))
        changes = 0
        while not running.done():
            await set_schedule(live.engine, [changes % (K + 1)] * (MAX_NUM_SEQS + 1))
            changes += 1
            await asyncio.sleep(0.005)
        return reference, (await running)[0], changes

    reference, toggled, changes = live.run(toggle())
    assert toggled == reference and changes >= 3  # k of 0, 1 and 2, even where a step is slow
    live.run(set_schedule(live.engine, TABLE))


@pytest.mark.engine
def test_the_step_log_knows_what_kind_of_step_took_how_long():
    live = live_engine()
    nothing, mixed = [0] * len(TABLE), [0] + [K] * 4 + [0] * (len(TABLE) - 5)
    cases = ((TABLE, (8, K, False)), (nothing, (8, 0, False)), (nothing, (8, 0, True)), (mixed, (8, 0, False)))
    try:
        for table, kind in cases:
            live.run(set_schedule(live.engine, table))
            live.run(pause_idle_draft(live.engine, kind[2]))
            found = _timed(live, kind)
            assert 3 <= found.steps <= 24 and 1e-4 < found.seconds < 5
            assert live.run(take_steps(live.engine)) == ()
    finally:
        live.run(set_schedule(live.engine, TABLE))
        live.run(pause_idle_draft(live.engine, False))


def _timed(live, kind):
    """Of a few generations the first in which steps of this kind were timed: on a busy machine the eight may come one by one."""
    for attempt in range(5):
        live.run(take_steps(live.engine))
        live.run(_generate(live.engine, f"timed-{kind}-{attempt}", tokens=24))
        steps = {(s.batch, s.k, s.paused): s for s in live.run(take_steps(live.engine)) if s.alike}
        if kind in steps and steps[kind].steps >= 3:
            return steps[kind]
    raise AssertionError(f"no steps of kind {kind} in five generations, the last had {sorted(steps)}")


@pytest.mark.engine
def test_law_7_a_draft_below_break_even_is_dropped_within_the_phase_and_greedy_output_does_not_change():
    live = live_engine()
    size = len(TABLE)
    reference, all_along = live.run(_generate(live.engine, "kept", tokens=64))
    live.run(take_steps(live.engine))
    live.run(set_schedule(live.engine, TABLE, [K + 1.5] * size))  # more than any draft can do
    outputs, did = live.run(_generate(live.engine, "dropped", tokens=64))
    steps = live.run(take_steps(live.engine))
    assert outputs == reference
    assert 64 <= did["drafts"] <= 64 + (1 + runner.IN_FLIGHT) * len(prompts()) < all_along["drafts"]
    assert any(s.paused and s.k == 0 for s in steps)
    assert live.run(schedule_state(live.engine))["table"] == [0] * size
    live.run(set_schedule(live.engine, TABLE, [1.0] * size))  # less than any draft does
    live.run(pause_idle_draft(live.engine, False))
    outputs, did = live.run(_generate(live.engine, "again", tokens=64))
    assert outputs == reference and did["drafts"] >= all_along["drafts"] - len(prompts())
    assert live.run(schedule_state(live.engine))["table"] == TABLE
    with pytest.raises(ValueError, match=f"break_even must have {size} entries"):
        live.run(set_schedule(live.engine, TABLE, [1.0]))
    live.run(set_schedule(live.engine, TABLE))


@pytest.mark.engine
def test_single_requests_stay_plain_beside_speculating_ones():
    live = live_engine()
    reference, everyone = live.run(_generate(live.engine, "all"))
    outputs, half = live.run(_generate(live.engine, "half", plain=lambda i: i % 2 == 0))
    assert outputs == reference and 0 < half["drafts"] < everyone["drafts"]
    outputs, none = live.run(_generate(live.engine, "none", plain=lambda i: True))
    assert outputs == reference and none["drafts"] == 0


@pytest.mark.engine
def test_a_bad_table_raises_and_the_old_one_stays_in_force():
    live = live_engine()
    for bad, reason in [([K], "33 entries, got 1"), ([K + 1] * len(TABLE), r"ints in 0\.\.3")]:
        with pytest.raises(ValueError, match=reason):
            live.run(set_schedule(live.engine, bad))
        assert live.run(schedule_state(live.engine))["table"] == TABLE
    outputs, did = live.run(_generate(live.engine, "alive"))
    assert len(outputs) == 8 and did["drafts"] > 0


@pytest.mark.engine
def test_a_few_steps_are_plain_and_timed_beside_drafted_ones_and_greedy_output_does_not_change():
    live, size = live_engine(), len(TABLE)
    live.run(set_schedule(live.engine, TABLE))
    reference, all_along = live.run(_generate(live.engine, "without-pairs", tokens=96))
    live.run(take_pairs(live.engine))
    found = []
    for attempt in range(5):
        live.run(set_schedule(live.engine, TABLE, [1.0] * size, 0.25))
        outputs, did = live.run(_generate(live.engine, f"with-pairs-{attempt}", tokens=96))
        assert outputs == reference
        assert 0 < did["drafts"] < all_along["drafts"], "some steps were plain"
        found += live.run(take_pairs(live.engine))
        if found:
            break
    assert all(p.k == K and 1 <= p.batch <= len(prompts()) for p in found) and found
    assert all(1e-4 < seconds < 5 for p in found for seconds in (p.drafted_seconds, p.plain_seconds))
    live.run(set_schedule(live.engine, TABLE))
    assert live.run(schedule_state(live.engine))["table"] == TABLE
    _, again = live.run(_generate(live.engine, "without-pairs-again", tokens=96))
    assert again["drafts"] == all_along["drafts"] and live.run(take_pairs(live.engine)) == ()
