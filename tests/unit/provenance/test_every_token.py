"""What runs over every token of a step is vectorised, and finds what the plain loop finds."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from builders.batches import kept_of, span_of, whole_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_plugin.api.events import LogprobBatch
from spec_plugin.api.spans import Span, Spans, fingerprints
from spec_plugin.policy.provenance import by_lag
from spec_plugin.trainer.log_probs import Responses, with_kept_log_probs

SEEDS = st.integers(0, 2**32)


def batch_of(mask: torch.Tensor) -> LogprobBatch:
    return replace(whole_batch(*mask.shape), mask=mask)


def documents(rng: random.Random) -> list[list[int]]:
    """Few token ids, so that beginnings repeat."""
    return [[rng.randrange(2) for _ in range(rng.randrange(1, 30))] for _ in range(rng.randrange(1, 6))]


def loop_within(known: dict[tuple[int, int], list[Span]], document: list[int]) -> list[list[Span]]:
    marks = [int(fingerprints(document[:until])[-1]) for until in range(len(document) + 1)]
    return [known[until, mark] for until, mark in enumerate(marks) if (until, mark) in known]


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_spans_are_those_that_a_loop_over_every_token_finds(seed: int) -> None:
    rng = random.Random(seed)
    texts, spans = documents(rng), Spans()
    for version in range(4):
        of = [(text, rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)) for text in texts]
        spans.add([span_of(t[: min(a, b)], t[min(a, b) : max(a, b)], version) for t, a, b in of], version)
    for text in [*texts, *documents(rng)]:
        assert spans._within(torch.tensor(text)) == loop_within(spans._known, text)


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_kept_log_probs_are_those_that_a_comparison_of_all_beginnings_finds(seed: int) -> None:
    rng = random.Random(seed)
    texts = documents(rng)
    ends = [(text, rng.randrange(1, len(text) + 1)) for text in texts + documents(rng)]
    stated = [(tuple(t[:n]), tuple(-rng.random() for _ in range(rng.randrange(1, n + 1)))) for t, n in ends]
    known = [kept_of(*one) for one in stated]
    starts = [rng.randrange(len(text)) for text in texts]
    width = max(len(t) - s for t, s in zip(texts, starts, strict=True))
    mask = torch.arange(width) < torch.tensor([len(t) - s for t, s in zip(texts, starts, strict=True)])[:, None]
    batch = batch_of(mask)
    expected, seen = batch.recomputed.clone(), torch.zeros_like(mask)
    said = dict(stated)
    for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
        for end in range(1, len(text) + 1):
            for back, value in enumerate(reversed(said.get(tuple(text[:end]), ()))):
                if end - 1 - back >= start:
                    expected[row, end - 1 - back - start], seen[row, end - 1 - back - start] = value, True
    responses = Responses([torch.tensor(t) for t in texts], starts, mask, None)
    found = with_kept_log_probs(batch, responses, known)
    seen &= mask
    rows = seen.any(-1)
    assert (found is None) == (not bool(rows.any()))
    if found is not None:
        assert found.rollout is not None and torch.equal(found.mask, seen[rows])
        assert torch.equal(found.rollout[found.mask], expected[rows][seen[rows]])


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_lags_are_those_of_every_token(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(3, 7, generator=generator) < 0.6
    versions = torch.randint(-1, 9, (3, 7), generator=generator)
    batch = replace(batch_of(mask), rollout=-torch.ones(3, 7), lag_allowed=True, policy_version=9)
    batch = replace(batch, versions=versions, ahead=seed % 3)
    expected: dict[int, list[tuple[int, int]]] = {}
    for row, column in mask.nonzero().tolist():
        known = [version for version in versions[row].tolist() if version >= 0]
        version = min(known, default=-1) if versions[row, column] < 0 else int(versions[row, column])
        lag = (1 if version < 0 else 9 - version) + batch.ahead
        expected.setdefault(lag, []).append((row, column))
    found: dict[int, LogprobBatch] = dict(by_lag(batch))
    assert list(found) == sorted(expected)
    assert {lag: [tuple(at) for at in part.mask.nonzero().tolist()] for lag, part in found.items()} == expected
