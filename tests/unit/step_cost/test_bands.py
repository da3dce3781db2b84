"""Batch sizes are counted by bands: few kinds of steps, none of which is taken for another."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
from builders.steps import mixed_steps

from spec_plugin.api.events import StepTiming
from spec_plugin.engine.vllm.schedule.steps import Kind, StepLog, _Open
from spec_plugin.policy.break_even import plan
from spec_plugin.step_cost.bands import Seen, band_of, middle, together
from spec_plugin.step_cost.model import CostModel

SIZE = 1024


def step(batch: int) -> SimpleNamespace:
    return SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(range(batch), 1),
        scheduled_spec_decode_tokens={},
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(num_computed_tokens=[100]),
    )


def took(batch: float) -> float:
    """All of a step is work for its requests."""
    return 1e-4 * batch


def test_every_size_has_one_band_named_by_its_largest_and_no_wider_than_an_eighth() -> None:
    bands = [band_of(b) for b in range(1, SIZE + 1)]
    assert bands == sorted(bands)
    assert bands[:18] == [*range(1, 17), 18, 18] and len(set(bands)) == 64
    for b, band in enumerate(bands, 1):
        assert b <= band <= 1.125 * b and band_of(band) == band


def test_a_mean_of_sizes_of_one_band_is_in_it_however_floats_are_rounded() -> None:
    draw = random.Random(0)
    tops = sorted({band_of(b) for b in range(1, SIZE + 1)})
    for case in range(600):
        top = draw.choice(tops)
        sizes = [b for b in range(top - top // 8, top + 1) if band_of(b) == top] if case % 2 else [top]
        seen = [
            Seen(draw.random(), draw.choice(sizes), 0.0, draw.randrange(1, 50)) for _ in range(draw.randrange(1, 9))
        ]
        assert band_of(middle(seen).batch) == top
    beyond = math.nextafter(18.0, 19.0)  # as sums of floats may come out
    assert band_of(beyond) == 18


@pytest.mark.parametrize("size", [32, 100, SIZE])
def test_a_band_of_the_table_of_k_is_made_of_whole_bands_of_the_cost_model(size: int) -> None:
    for part in plan.bands(size)[:-1]:
        assert band_of(part[-1]) == part[-1]


def test_a_log_of_a_batch_that_drains_is_small_and_says_how_many_requests_each_band_had() -> None:
    log, now = StepLog(), 0.0
    for batch in range(SIZE, 0, -1):
        log.begin(step(batch), [0] * (SIZE + 1), now)
        now += took(batch)
    log.interrupt(now)  # the last one is not alike
    found = log.take()
    assert len(found) <= 64
    assert sum(t.forwards for t in found if t.alike) == SIZE * (SIZE + 1) // 2 - 1
    assert all(t.seconds == pytest.approx(took(t.batch)) for t in found), "seconds and requests are of the same steps"


@pytest.mark.parametrize("near", ["the smallest", "the largest"])
def test_a_band_is_not_taken_to_be_as_dear_as_its_largest_size(near: str) -> None:
    """Most steps were of one end of each band."""
    model, draw = CostModel(), random.Random(1)
    for k in (0, 1):
        log = StepLog()
        for batch in range(1, 257):
            inside = [b for b in range(1, 257) if band_of(b) == band_of(batch)]
            often = batch == (inside[0] if near == "the smallest" else inside[-1])
            for _ in range(40 if often else 1):
                step = _Open(0.0, batch, Kind(k, k == 0, True, False), batch * (k > 0), 100.0)
                log._steps[band_of(batch), step.kind].add(step, took(batch) * (1 + k) * draw.uniform(0.98, 1.02))
        model.observe(log.take())
    for batch in (17, 24, 40, 70, 100, 130, 180, 250, 256):
        assert model.seconds(batch, 0) == pytest.approx(took(batch), rel=0.015)


def test_the_middle_of_what_was_seen_is_no_burst_and_of_few_the_median() -> None:
    calm = [Seen(1.0, 8, 50.0, 4)] * 5
    assert middle([*calm, Seen(9.0, 8, 50.0, 10), Seen(0.1, 8, 50.0, 1)]).seconds == 1.0
    assert middle([Seen(s, 8, 0.0, 1) for s in (3.0, 1.0, 2.0)]).seconds == 2.0
    assert middle([Seen(s, 8, 0.0, 1) for s in (4.0, 1.0, 2.0, 3.0)]).seconds == 2.5


def test_engines_are_told_as_one_by_kind_and_band() -> None:
    timings = [StepTiming(b, 3, False, took(b), 10, 100.0) for b in (17, 18, 19)] + [StepTiming(18, 0, True, 1.0, 1)]
    one, other, plain = together(timings)
    assert (one.batch, one.steps, one.forwards) == (17.5, 20, 350) and one.seconds == pytest.approx(took(17.5))
    assert (other, plain) == tuple(timings[2:])
    (mixed,) = together([mixed_steps(17, 3, True, 1.0, 10, 100), mixed_steps(18, 3, True, 2.0, 30, 200)])
    assert mixed == mixed_steps(17.75, 3, True, 3.0, 40, 300)
