from __future__ import annotations

import torch

from draft_training.loss import LossStats, replay
from draft_training.unroll import Unroll


def stats(steps: int, chance: float, rounds: int = 100) -> LossStats:
    zero = torch.zeros(steps, dtype=torch.float64)
    accepted = torch.tensor([rounds * chance ** (i + 1) for i in range(steps)], dtype=torch.float64)
    return LossStats(zero, zero, accepted, torch.tensor(float(rounds), dtype=torch.float64))


def lengths(unroll: Unroll, chance: float, times: int, rounds: int = 100) -> list[int]:
    out = []
    for _ in range(times):
        unroll.observe(stats(unroll.steps, chance, rounds))
        out.append(unroll.steps)
    return out


def test_a_good_draft_is_unrolled_to_the_engines_k_and_no_further():
    seen = lengths(Unroll(3, 8), 0.95, 40)
    assert seen[:4] == [3, 3, 3, 4], "each length is looked at for a while"
    assert seen[-1] == 8 and sorted(seen) == seen


def test_a_draft_that_does_not_reach_that_far_stays_where_it_earns_something():
    assert lengths(Unroll(3, 8), 0.5, 40)[-1] == 3
    assert lengths(Unroll(3, 8), 0.8, 40)[-1] == 5, "0.8 ** 4 reaches the fourth in 41 of 100 rounds, the fifth in 33"


def test_what_is_no_longer_reached_is_given_up():
    unroll = Unroll(3, 8, grown=True)
    assert unroll.steps == 8
    assert lengths(unroll, 0.5, 60)[-1] == 3


def test_between_the_two_bounds_nothing_moves():
    assert set(lengths(Unroll(3, 5, grown=True), 0.75, 30)) == {5}, "0.24 is neither enough nor too little"


def test_responses_too_short_to_replay_a_longer_chain_do_not_make_it_grow():
    assert lengths(Unroll(3, 8), 1.0, 40, rounds=2)[-1] == 3
    assert lengths(Unroll(3, 8, grown=True), 1.0, 60, rounds=0)[-1] == 3


def test_the_engines_k_bounds_even_the_first():
    assert Unroll(3, 2).steps == 2


def test_a_saved_one_goes_on_where_it_was():
    a, b = Unroll(3, 8), Unroll(3, 8)
    lengths(a, 0.95, 6)
    b.load_state_dict(a.state_dict())
    assert lengths(a, 0.95, 9) == lengths(b, 0.95, 9)
    b.load_state_dict({})
    short = Unroll(3, 4)
    short.load_state_dict(a.state_dict())
    assert short.steps == 4, "within the present k"


def test_more_unrolled_steps_than_sampled_tokens_replay_no_round():
    short = torch.ones(8, 3, dtype=torch.bool)
    accepted, rounds = replay(short, short, torch.arange(3))
    assert float(rounds) == 0.0 and not accepted.any()
