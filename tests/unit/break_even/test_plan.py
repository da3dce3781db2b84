from __future__ import annotations

from itertools import pairwise

import pytest
from builders.cost import compute_bound, memory_bound, model
from builders.steps import mixed_steps

from spec_plugin.api.events import RolloutStats, StepTiming
from spec_plugin.policy.break_even import plan
from spec_plugin.policy.sampler_memory import fit_sampler_memory

SIZE, K = 64, 3


def mixed(batch, k, paused):
    """Free up to 16 tokens, then 1 ms each: drafting pays in the tail of a phase only."""
    return 0.016 + 1e-3 * max(0, batch * (k + 1) - 16) + (0.0 if paused else 0.0004) + 2e-4 * max(0, k - 1)


def best(seconds, acceptance, load=None, current=(0,) * (SIZE + 1)):
    found = model(seconds, batches=(1, 2, 4, 8, 16, 32, 64))
    return plan.best(found, acceptance, load or {8: 1.0}, current, range(K + 1))


def test_a_good_draft_is_used_everywhere_where_tokens_are_free():
    chosen = best(memory_bound(0.1), [0.9])
    assert chosen.table == (0,) + (K,) * SIZE
    assert chosen.speedup == pytest.approx(3.439 / 1.3, rel=0.03)


def test_a_middling_draft_is_asked_for_fewer_tokens():
    chosen = best(memory_bound(0.25), [0.5])
    assert set(chosen.table[1:]) == {1}  # 1.5 / 1.25, against 1.75 / 1.5 and 1.875 / 1.75


def test_a_useless_draft_is_not_used():
    assert not best(memory_bound(0.1), [0.05]).speculates


def test_where_every_token_costs_time_no_draft_is_used():
    assert not best(compute_bound, [0.95], {1: 1.0, 64: 1.0}).speculates


def test_the_tail_of_a_batch_gets_more_tokens_than_its_body():
    table = best(mixed, [0.9], {1: 10.0, 64: 10.0}).table
    assert table[1] == table[2] == K and table[64] == 0
    assert list(table[1:]) == sorted(table[1:], reverse=True)


def test_law_7_a_tail_that_gains_less_than_the_body_loses_is_left_alone():
    """Where k is 0 in a mixed table, the draft still runs one forward pass."""

    def dear_draft(batch, k, paused):
        return mixed(batch, k, paused) + (0.0 if paused else 0.004)

    assert best(dear_draft, [0.9], {1: 10.0}).speculates
    assert not best(dear_draft, [0.9], {1: 1.0, 64: 1000.0}).speculates


def test_switching_on_needs_a_margin_and_staying_on_does_not():
    on = (0,) + (K,) * SIZE
    acceptance = [0.34]  # 1.02 to 1.04 times plain at the best k
    assert not best(memory_bound(0.3), acceptance).speculates
    assert best(memory_bound(0.3), acceptance, current=on).speculates


def test_a_k_that_is_hardly_better_does_not_replace_the_present_one():
    present = (0,) + (2,) * SIZE
    assert best(memory_bound(0.105), [0.55], current=present).table == present
    assert best(memory_bound(0.02), [0.95], current=present).table == (0,) + (K,) * SIZE


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 100, 256])
def test_bands_cover_every_batch_size_once(size):
    found = plan.bands(size)
    assert [b for band in found for b in band] == list(range(1, size + 1))
    assert all(band[-1] <= 1.5 * band[0] for band in found)


def test_noise_of_single_batch_sizes_does_not_make_the_table_ragged():
    found = model(mixed, batches=range(1, 65), ks=(0, 1, 2, 3), noise=0.05)
    table = plan.best(found, [0.7], {1: 10.0, 8: 10.0}, (0,) * (SIZE + 1), range(K + 1)).table
    changes = sum(a != b for a, b in pairwise(table[1:]))
    assert table[1] == K and 1 <= changes <= 4


def test_the_break_even_of_a_table_is_that_of_each_batch_size():
    found = model(mixed, batches=(1, 2, 4, 8, 16, 32, 64))
    table = (0, K, K, 1, *(0,) * (SIZE - 3))
    break_even = plan.break_even_of(found, table)
    assert len(break_even) == len(table)
    for b in (1, 2, 3):
        assert break_even[b] == pytest.approx(found.seconds(b, table[b]) / found.seconds(b, 0, paused=False))
    assert break_even[4] == break_even[SIZE] == 1.0


def test_what_a_phase_made_at_each_batch_size_is_of_all_its_decoding_steps():
    """Of a control group that is in all large batches, steps that are alike would show the small ones alone."""
    alike = (StepTiming(1, 3, False, 0.02, 10), StepTiming(8, 0, False, 0.02, 5))
    mixed = (mixed_steps(8, 1, False, 2.0, 100, 700), mixed_steps(8, 1, True, 2.0, 100, 700))
    stats = RolloutStats(1, 8, 1000, 5.0, steps=alike + mixed)
    assert plan.load_of(stats, (0.5, 0.5)) == {1: 10 * 1.875, 8: 5 * 8 + 800 + 350}


V, ROOM = 152_064, 2 << 30


def longest(k: int, table: tuple[int, ...]) -> int:
    """The largest batch that drafts k."""
    return max(b for b, found in enumerate(table) if found >= k)


def test_k_is_cut_to_what_the_memory_of_v1s_sampler_allows():
    """Of 1024 requests with a vocabulary of 152k, 521 may verify three tokens each, 700 two, all of them one."""
    table = fit_sampler_memory((0,) + (3,) * 1024, V, ROOM)
    assert longest(3, table) == 521 and longest(2, table) == 700 and table[1024] == 1
    assert fit_sampler_memory((0,) + (3,) * 1024, V, 0)[1024] == 0, (
        "but for the room none: the profile has no log-probs"
    )
    assert fit_sampler_memory((0, 3, 1, 0), 1000, ROOM) == (0, 3, 1, 0)


@pytest.mark.parametrize(("ranks", "k"), [(1, 3), (2, 2), (4, 3), (8, 3)])
def test_on_v2_1024_requests_draft_three_tokens_each_of_a_vocabulary_of_152k(ranks, k):
    """On two ranks two: each gathers the logits of both, and holds its own half beside two copies of all."""
    table = fit_sampler_memory((0,) + (8,) * 1024, V, ROOM, v2=True, in_chunks=True, ranks=ranks)
    assert table[1024] == k and table[256] == 8
    assert fit_sampler_memory((0,) + (8,) * 1024, V, 0, v2=True, in_chunks=True, ranks=ranks)[1024] == 0


def test_v2_of_a_vllm_that_verifies_all_at_once_is_not_bounded_by_the_memory_of_v1():
    """vLLM 0.26: by V1's count 256 requests got 2 of 8 tokens. V1's profile sees more, too, which V2's does not."""
    full = (0,) + (8,) * 256
    on_v1, on_v2 = (fit_sampler_memory(full, V, ROOM, v2=v2, sampled=True) for v2 in (False, True))
    assert on_v1[256] == 2 and on_v2 == full
    assert fit_sampler_memory((0,) + (8,) * 1024, V, ROOM, v2=True)[1024] == 1
    assert fit_sampler_memory(full, V, 0, v2=True)[256] == 0


def test_a_draft_of_all_tokens_or_none_gets_no_k_between() -> None:
    found, off = model(memory_bound(0.1), batches=(1, 2, 4, 8, 16, 32, 64)), (0,) * (SIZE + 1)
    some = plan.best(found, [0.6, 0.1], {8: 1.0}, off, range(K + 1)).table
    whole = plan.best(found, [0.6, 0.1], {8: 1.0}, off, (0, K)).table
    assert 0 < max(some) < K and set(whole) <= {0, K}
