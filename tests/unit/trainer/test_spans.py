"""Engines say what they sampled, trainers have documents: both meet by fingerprints."""

from __future__ import annotations

import torch
from builders.batches import span_of

from spec_plugin.api.spans import Spans, fingerprints

PROMPT, FIRST, SECOND = [5, 6, 7], [8, 9], [10, 11, 12]
DOCUMENT = torch.tensor([*PROMPT, *FIRST, *SECOND])
MASK = torch.ones(1, 5, dtype=torch.bool)


def known(*spans: object) -> Spans:
    out = Spans()
    out.add(spans, 9)
    return out


def test_a_response_that_was_cut_short_has_the_version_of_each_part():
    cut = span_of(PROMPT, FIRST, 3)
    rest = span_of([*PROMPT, *FIRST], SECOND, 4, (6, 7))
    versions, plain, *_ = known(cut, rest).of([DOCUMENT], [3], MASK)
    assert versions.tolist() == [[3, 3, 4, 4, 4]]
    assert plain.tolist() == [[False, False, False, True, False]]


def test_what_no_engine_has_said_is_unknown():
    other = span_of(PROMPT, [8, 8], 3)
    versions, plain, *_ = known(other).of([DOCUMENT], [3], MASK)
    assert versions.tolist() == [[-1] * 5] and not plain.any()
    versions, *_ = known(span_of([*PROMPT, *FIRST], SECOND, 4)).of([DOCUMENT], [3], MASK)
    assert versions.tolist() == [[-1, -1, 4, 4, 4]]


def test_a_turn_of_a_conversation_is_found_in_the_middle_of_its_document():
    document = torch.tensor([*PROMPT, *FIRST, 40, 41, *SECOND])
    spans = known(span_of(PROMPT, FIRST, 2), span_of([*PROMPT, *FIRST, 40, 41], SECOND, 3))
    versions, *_ = spans.of([document], [3], torch.ones(1, 7, dtype=torch.bool))
    assert versions.tolist() == [[2, 2, -1, -1, 3, 3, 3]]


def test_every_token_and_its_place_count():
    tokens = torch.arange(200).numpy()
    seen = {int(fingerprints(tokens)[-1])}
    for i in range(199):
        swapped = tokens.copy()
        swapped[[i, i + 1]] = swapped[[i + 1, i]]
        changed = tokens.copy()
        changed[i] += 1
        seen |= {int(fingerprints(swapped)[-1]), int(fingerprints(changed)[-1])}
    assert len(seen) == 1 + 2 * 199
    assert fingerprints([])[-1] == 0 and fingerprints([0])[-1] != 0 != fingerprints([0, 0])[-1]
    assert (fingerprints(tokens)[:50] == fingerprints(tokens[:49])).all()


def test_what_nobody_will_ask_for_is_forgotten():
    spans = known(span_of(PROMPT, FIRST, 3), span_of(PROMPT, SECOND, 60))
    spans.add([], 3 + 64)
    assert len(spans._known) == 2
    spans.add([], 3 + 65)
    assert [s.version for same in spans._known.values() for s in same] == [60]


def both(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([first]), torch.tensor([last])


def test_of_two_requests_that_sampled_the_same_the_one_that_the_trainer_means():
    """A prompt that comes back may get the same answer, before the first one was trained on."""
    spans = known(span_of(PROMPT, [*FIRST, *SECOND], 3, (3, 5)), span_of(PROMPT, [*FIRST, *SECOND], 5))
    assert spans.of([DOCUMENT], [3], MASK)[0].tolist() == [[5] * 5]
    versions, plain, *_ = spans.of([DOCUMENT], [3], MASK, both(3, 3))
    assert versions.tolist() == [[3] * 5] and plain.tolist() == [[True, True, False, False, False]]
    assert spans.of([DOCUMENT], [3], MASK, both(4, 4))[0].tolist() == [[5] * 5], "and a wrong one is not hidden"


def test_of_two_requests_that_sampled_the_same_the_one_whose_log_probs_the_trainer_has():
    """Where it does not know by which version its text was sampled; a batch begins behind the document's first token."""
    response, older, newer = [*FIRST, *SECOND], [-1.0, -2.0, -3.0, -4.0, -5.0], [-1.0, -2.0, -3.0, -4.0, -5.1]
    spans = known(span_of(PROMPT, response, 3, (3, 5), older), span_of(PROMPT, response, 5, log_probs=newer))
    mask = torch.tensor([[False, False] + [True] * 5])
    for stated, version, plain in ((older, 3, 2), (newer, 5, 0), ([float("nan")] * 5, 5, 0)):
        rollout = torch.tensor([[0.0, 0.0, *stated]])
        versions, undrafted, *_ = spans.of([DOCUMENT], [1], mask, rollout=rollout)
        assert versions[0, 2:].tolist() == [version] * 5 and int(undrafted.sum()) == plain
    assert spans.of([DOCUMENT], [3], MASK)[0].tolist() == [[5] * 5]
    silent = known(span_of(PROMPT, response, 3, log_probs=older), span_of(PROMPT, response, 5))
    assert silent.of([DOCUMENT], [3], MASK, rollout=torch.tensor([newer]))[0].tolist() == [[3] * 5]


def test_each_part_of_a_response_is_told_apart_by_its_own_log_probs():
    """Two requests of the same text, of which one was cut by a sync."""
    response, stated = [*FIRST, *SECOND], [-1.0, -2.0, -3.0, -4.0, -5.0]
    cut = [
        span_of(PROMPT, FIRST, 3, log_probs=stated[:2]),
        span_of([*PROMPT, *FIRST], SECOND, 4, log_probs=stated[2:]),
    ]
    spans = known(*cut, span_of(PROMPT, response, 5, log_probs=[-1.0, -2.0, -3.0, -4.0, -6.0]))
    assert spans.of([DOCUMENT], [3], MASK, rollout=torch.tensor([stated]))[0].tolist() == [[3, 3, 4, 4, 4]]


def test_of_two_requests_that_a_sync_cut_at_other_places_a_token_is_of_the_older_version():
    cuts = [part for at in (2, 3) for part in ((0, at, 3, (3, 4)), (at, None, 4, (6, 7)))]
    response = [*FIRST, *SECOND]
    spans = known(*(span_of([*PROMPT, *response[:at]], response[at:until], v, p) for at, until, v, p in cuts))
    for order in (spans, known(*reversed([s for same in spans._known.values() for s in same]))):
        versions, plain, *_ = order.of([DOCUMENT], [3], MASK, both(3, 4))
        assert versions.tolist() == [[3, 3, 3, 4, 4]]
        assert plain.tolist() == [[True, False, False, True, False]]


def test_what_two_requests_sampled_is_plain_only_if_both_times_it_was():
    response = [*FIRST, *SECOND]
    spans = known(span_of(PROMPT, response, 3, (3, 6)), span_of(PROMPT, response, 3))
    assert not spans.of([DOCUMENT], [3], MASK, both(3, 3))[1].any()


def test_of_two_requests_of_which_one_was_complete_before_a_sync_each_has_its_own_versions():
    response = [*FIRST, *SECOND]
    cut = [span_of(PROMPT, FIRST, 3), span_of([*PROMPT, *FIRST], SECOND, 4)]
    spans = known(*cut, span_of(PROMPT, response, 3))
    assert spans.of([DOCUMENT], [3], MASK, both(3, 3))[0].tolist() == [[3] * 5]
    assert spans.of([DOCUMENT], [3], MASK, both(3, 4))[0].tolist() == [[3, 3, 4, 4, 4]]


def test_what_is_said_again_is_the_newest():
    """The same text sampled by version 3, by 5, and once more by 3, whose engine was late."""
    response = [*FIRST, *SECOND]
    spans = known(*(span_of(PROMPT, response, version) for version in (3, 5, 3)))
    assert spans.of([DOCUMENT], [3], MASK)[0].tolist() == [[3] * 5]


def test_law_3_of_equal_texts_that_go_on_the_oldest_is_taken() -> None:
    """Its log-probs are the furthest from what the actor recomputes: no newer one excuses them."""
    told = torch.tensor([1]), torch.tensor([5])
    origin = known(span_of(PROMPT, FIRST, 2), span_of(PROMPT, FIRST, 4)).of([DOCUMENT], [3], MASK, told)
    assert origin.versions.tolist() == [[2, 2, -1, -1, -1]]


def test_law_3_a_span_says_nothing_of_what_comes_behind_it() -> None:
    origin = known(span_of(PROMPT, FIRST, 3)).of([DOCUMENT], [3], MASK)
    assert origin.versions.tolist() == [[3, 3, -1, -1, -1]]
