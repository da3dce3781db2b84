"""Texts that were sampled more than once, and what an engine's word is no longer about."""

from __future__ import annotations

import torch
from builders.batches import span_of

from spec_plugin.spans import Spans

PROMPT, FIRST, SECOND = [5, 6, 7], [8, 9], [10, 11, 12]
DOCUMENT = torch.tensor([*PROMPT, *FIRST, *SECOND])
MASK = torch.ones(1, 5, dtype=torch.bool)


def known(*spans: object) -> Spans:
    out = Spans()
    out.add(spans, 9)
    return out


def test_law_3_of_equal_texts_that_go_on_the_oldest_is_taken() -> None:
    """Its log-probs are the furthest from what the actor recomputes: no newer one excuses them."""
    told = torch.tensor([1]), torch.tensor([5])
    origin = known(span_of(PROMPT, FIRST, 2), span_of(PROMPT, FIRST, 4)).of([DOCUMENT], [3], MASK, told)
    assert origin.versions.tolist() == [[2, 2, -1, -1, -1]]


def test_law_3_a_span_says_nothing_of_what_comes_behind_it() -> None:
    origin = known(span_of(PROMPT, FIRST, 3)).of([DOCUMENT], [3], MASK)
    assert origin.versions.tolist() == [[3, 3, -1, -1, -1]]
