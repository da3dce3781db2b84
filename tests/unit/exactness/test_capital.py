"""The capital is a test martingale: by adding up all that may happen, and of what is spread between its cells."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spec_plugin.policy.exactness.capital import BANDS, BETS, PLAIN, SHAPE, WEIGHED, Capital, bets, growth
from spec_plugin.policy.exactness.statistics import NAMES, statistics_of

V = 6


def laws(seed: int, apart: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a policy's p and an engine's p' are, [V] each, and the statistics of all tokens under p, [V, S]."""
    stream = torch.Generator().manual_seed(seed)
    logits = torch.randn(V, generator=stream, dtype=torch.float64)
    other = logits + apart * torch.randn(V, generator=stream, dtype=torch.float64)
    log_p = logits.log_softmax(-1)
    return log_p.exp().numpy(), other.softmax(-1).numpy(), statistics_of(log_p.expand(V, V), torch.arange(V)).numpy()


def expected(seed: int, apart: float, allowed: float | None) -> np.ndarray:
    """Of each cell for all places, the mean factor by which a token of the engine's makes it grow, [designs, S, bets]."""
    p, stated, values = laws(seed, apart)
    return np.tensordot(stated, np.exp(bets(values, p / stated, allowed)), 1)


@pytest.mark.parametrize("seed", range(5))
def test_law_2_a_correct_engine_grows_no_cell_in_the_mean(seed):
    assert np.abs(expected(seed, 0.1, None)[0] - 1.0).max() < 1e-12
    assert np.abs(expected(seed, 0.0, 0.0) - 1.0).max() < 1e-12


@pytest.mark.parametrize("seed", range(5))
def test_law_2_unweighed_cells_do_not_grow_while_rounding_moves_means_by_no_more_than_is_allowed(seed):
    _, stated, values = laws(seed, 0.01)
    drift = np.abs(stated @ values).max()
    assert 0.0 < drift < 0.02 and expected(seed, 0.01, float(drift))[1].max() <= 1.0 + 1e-12
    assert expected(seed, 0.01, 0.0)[1].max() > 1.0


def test_law_2_a_wrong_engine_grows_some():
    p, _, values = laws(3, 0.0)
    hot = np.eye(V)[p.argmax()]  # a tenth of the tokens are the draft's, unasked
    means = np.tensordot(0.9 * p + 0.1 * hot, bets(values, np.ones(V), 0.004), 1)
    assert means[0].max() > 0.0 and means[1].max() > 0.0


def test_each_token_is_bet_on_anywhere_and_in_its_band():
    each = bets(np.full((len(BANDS), len(NAMES)), 0.5), np.ones(len(BANDS)), None)
    found = growth(each, np.array(BANDS))
    assert found.shape == SHAPE and not found[1].any(), "nothing is bet unweighed where nothing is allowed"
    assert np.allclose(found[0, 0], found[0, 1:].sum(0)) and np.allclose(found[0, 1], np.log(1 + 0.5 * BETS))
    edge = growth(each[:1], np.array([BANDS[1] - 1]))
    assert edge[0, 1].any() and not edge[0, 2:].any()


def test_a_bet_that_loses_all_leaves_a_cell_finite():
    assert np.isfinite(bets(np.full((1, len(NAMES)), -2.0), np.full(1, 1e6), 0.004)).all()


def test_a_token_that_is_stated_to_be_impossible_leaves_the_evidence_a_number():
    """Of a low temperature: its stated log-prob lies more than 709 nats below the policy's, and exp of that is infinite."""
    for value in (-0.5, 0.0, 0.5):
        assert np.isfinite(bets(np.full((1, len(NAMES)), value), np.full(1, np.inf), 0.004)).all()


def test_spreading_keeps_the_mean_and_lets_a_cell_that_lost_all_come_back():
    stream = np.random.default_rng(0)
    capital = Capital(stream.normal(0, 3, SHAPE), phases=5)
    after = capital.after(np.zeros(SHAPE), 7)
    assert np.allclose([after.log10(d) for d in (WEIGHED, PLAIN)], [capital.log10(d) for d in (WEIGHED, PLAIN)])
    assert (after.tokens, after.phases) == (7, 6)
    ruined = Capital(np.where(np.arange(SHAPE[-1]) == 3, -1e4, 0.0) * np.ones(SHAPE))
    assert ruined.after(np.zeros(SHAPE), 0).logs.min() > -6.0


def test_it_is_the_mean_of_its_cells_and_names_the_richest():
    logs = np.full(SHAPE, -np.inf)
    logs[WEIGHED, 2, 2, 4] = np.log(1e7) + np.log(logs[WEIGHED].size)
    logs[PLAIN, 0, 0, 1] = 0.0
    capital = Capital(logs)
    assert np.isclose(capital.log10(WEIGHED), 7.0), "the largest cell alone is no evidence"
    assert capital.richest(WEIGHED) == "surprise, from token 256 of responses on"
    assert capital.richest(PLAIN) == "the likeliest token"
    assert Capital.new().log10(WEIGHED) == Capital.new().log10(PLAIN) == 0.0
