from __future__ import annotations

import itertools
import random

import pytest
import torch

from spec_plugin.policy.provenance.exceedance import binomial_p, exceedance_p, exceedance_test, share_test
from spec_plugin.policy.provenance.windows import Windows, difference_metrics, median, sequence_means, windows


def test_exceedances_are_exact_by_brute_force_over_all_orders():
    n, m, r = 4, 5, 4
    found = []
    for others in itertools.combinations(range(n + m), n):  # which of the ranks are the n
        plain = [i for i in range(n + m) if i not in others]
        found.append(sum(i > plain[r - 1] for i in others))
    for above in range(n + 1):
        share = sum(f >= above for f in found) / len(found)
        assert exceedance_p(above, n, r, m) == pytest.approx(share, rel=1e-9)


def test_the_binomial_tail_agrees_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    for above, n in ((0, 3), (3, 16), (10, 16), (60, 500), (500, 500)):
        assert binomial_p(above, n, 0.1) == pytest.approx(stats.binom.sf(above - 1, n, 0.1), rel=1e-6)


@pytest.mark.parametrize("level", [0.05, 0.01])
def test_equal_distributions_are_called_worse_no_more_often_than_declared(level):
    """Heavy-tailed windows, factor 1: the worst null."""
    rng, repetitions = random.Random(0), 2000
    wrong = 0
    for _ in range(repetitions):
        plain, other = ([rng.paretovariate(1.1) for _ in range(size)] for size in (40, 60))
        wrong += exceedance_test(other, plain, 1.0, 0.0)[0] <= level
    assert wrong / repetitions <= level + 3 * (level * (1 - level) / repetitions) ** 0.5


def test_a_factor_and_a_floor_are_honest():
    plain, twice, tiny = [1.0] * 40, [2.0] * 40, [1e-9] * 40
    assert exceedance_test(twice, plain, 3.0, 0.0) == (1.0, 3.0)
    assert exceedance_test(twice, plain, 1.5, 0.0)[0] < 1e-9
    assert exceedance_test(tiny, [0.0] * 40, 3.0, 1e-6) == (1.0, 1e-6)
    assert share_test(twice, 1.0)[0] < 1e-30 and share_test(twice, 3.0)[0] == 1.0


def test_windows_are_of_every_sequence_and_no_longer_than_64():
    diff = torch.arange(40.0)[:, None].expand(40, 500)
    mask = torch.zeros(40, 500, dtype=torch.bool)
    mask[:, 100:400] = True
    found = windows(diff, mask, random.Random(0))
    assert found.means == tuple(map(float, range(40))) and found.maxima == found.means
    assert len(windows(diff[:10], mask[:10], random.Random(0))) == 20
    counting = torch.arange(500.0)[None]
    (one,) = {m - 31.5 for m in windows(counting, mask[:1], random.Random(1)).means[:1]}
    assert 100 <= one <= 400 - 64


def test_short_responses_are_put_together():
    diff = torch.ones(30, 5)
    mask = torch.arange(5)[None] < 3 + torch.arange(30)[:, None] % 2
    found = windows(diff, mask, random.Random(0))
    assert len(found) == 10 and set(found.means) == {1.0}
    assert len(windows(diff[:2], mask[:2], random.Random(0))) == 0
    assert len(windows(diff[:0], mask[:0], random.Random(0))) == 0


def test_metrics_of_differences_and_median():
    diff, mask = torch.tensor([[0.0, 1.0, 5.0, 9.0]]), torch.tensor([[True, True, True, False]])
    assert list(difference_metrics(diff, mask, far=2.0).values()) == [2.0, 5.0, 5.0, pytest.approx(1 / 3)]
    assert set(difference_metrics(diff, mask & False, 1.0).values()) == {0.0}
    assert median([3.0, 1.0, 2.0]) == 2.0 and median([]) == 0.0
    assert len(Windows((1.0,), (2.0,)) + Windows((3.0,), (4.0,))) == 2


def test_the_mean_of_a_sequence_is_of_its_counted_tokens_and_short_ones_have_none():
    diff, mask = (
        torch.tensor([[1.0, 3.0, 9.0], [5.0, 5.0, 5.0]]),
        torch.tensor([[True, True, False], [True, False, False]]),
    )
    assert sequence_means(diff, mask, shortest=2) == {0: 2.0}


def test_windows_are_anywhere_in_a_response():
    """What goes wrong only late in a response is seen, too."""
    rng, row = random.Random(0), torch.arange(1000.0)[None]
    starts = [m - 63 for _ in range(300) for m in windows(row, torch.ones_like(row, dtype=torch.bool), rng).maxima]
    first, second = starts[::2], starts[1::2]  # two of each sequence, where there are few
    assert min(first) < 30 and max(first) > 406 and min(second) < 530 and max(second) > 906
