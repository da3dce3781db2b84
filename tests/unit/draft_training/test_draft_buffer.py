from __future__ import annotations

import json
import random

import pytest
import torch
from draft_helpers import make_document
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_training import Document, HiddenBuffer
from draft_training.batch import trainable_positions


def buffer(max_tokens: int = 1000, max_bytes: int = 1 << 30, seed: int = 0) -> HiddenBuffer:
    return HiddenBuffer(max_tokens, max_bytes, seed)


def versions(documents: list[Document]) -> list[int]:
    return [d.policy_version for d in documents]


@given(st.lists(st.integers(3, 60), max_size=12), st.integers(10, 80), st.integers(3_000, 30_000))
@settings(max_examples=30, deadline=None)
def test_the_buffer_never_exceeds_its_bounds(lengths, max_tokens, max_bytes):
    b = buffer(max_tokens, max_bytes)
    for i, n in enumerate(lengths):
        b.add(make_document(n, i, i, prompt=1))
        held = b.sample(1000, 0.5)
        assert len(held) == len(b) and sum(map(len, held)) == b.tokens <= max_tokens
        assert sum(d.nbytes for d in held) <= max_bytes


def test_the_oldest_documents_leave_first():
    b = buffer(max_tokens=30)
    for version in range(5):
        b.add(make_document(10, version, version))
    assert sorted(versions(b.sample(100, 0.5))) == [2, 3, 4]


def test_a_document_beyond_the_bound_is_cut_to_its_prefix():
    b = buffer(max_tokens=12)
    big = make_document(50, 0)
    assert b.add(big)
    (kept,) = b.sample(100, 0.0)
    assert len(kept) == 12 and torch.equal(kept.aux, big.aux[:12])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["aux", "last"])
def test_hidden_states_that_are_not_finite_are_refused(poison, field):
    b, d = buffer(), make_document(10, 0)
    getattr(d, field)[4, 2] = poison
    assert not b.add(d) and len(b) == 0


def test_a_document_with_nothing_to_learn_is_refused():
    b = buffer()
    assert not b.add(make_document(2, 0, prompt=0)) and not b.add(make_document(9, 0, prompt=8))
    assert len(b) == 0


def test_a_misaligned_document_cannot_be_made():
    d = make_document(10, 0)
    with pytest.raises(ValueError, match="must agree"):
        Document(d.input_ids, d.aux[:9], d.last, d.loss_mask, 0)


def test_the_buffer_keeps_copies():
    b, d = buffer(), make_document(10, 0)
    b.add(d)
    before = d.aux.clone()
    d.aux.zero_()
    assert torch.equal(b.sample(10, 0.0)[0].aux, before)


def test_the_newest_policy_version_comes_first_and_replay_gets_its_share():
    b = buffer()
    for i in range(40):
        b.add(make_document(10, i, version=i // 20))
    drawn = versions(b.sample(100, 0.3))
    assert len(drawn) == 10 and drawn.count(0) == 3
    assert versions(b.sample(100, 0.0)) == [1] * 10


def test_either_kind_fills_what_the_other_leaves():
    b = buffer()
    for i in range(10):
        b.add(make_document(10, i, version=0))
    assert len(b.sample(100, 0.3)) == 10  # nothing old: fresh documents take the replay share
    b.add(make_document(10, 99, version=1))
    drawn = versions(b.sample(100, 0.3))
    assert drawn.count(1) == 1 and drawn.count(0) == 9


def test_a_document_longer_than_a_step_is_drawn_as_a_window_with_something_to_learn():
    b = buffer()
    long = make_document(200, 0, prompt=150)
    b.add(long)
    starts = set()
    for _ in range(50):
        (w,) = b.sample(20, 0.0)
        assert len(w) == 20 and trainable_positions(w.loss_mask) > 0
        starts.add(next(i for i in range(200) if torch.equal(long.aux[i], w.aux[0])))
    assert len(starts) > 10


def test_sampling_never_draws_more_tokens_than_asked():
    b = buffer()
    for i in range(20):
        b.add(make_document(5 + 3 * i, i, version=i % 3))
    for tokens in (16, 33, 100, 400):
        drawn = b.sample(tokens, 0.25)
        assert drawn and sum(map(len, drawn)) <= tokens
        assert len({id(d) for d in drawn}) == len(drawn)


def test_sampling_uses_its_own_random_stream_and_its_state_resumes_it():
    b = buffer()
    for i in range(30):
        b.add(make_document(10, i, version=i))
    before = random.getstate(), torch.get_rng_state()
    saved = json.loads(json.dumps(b.state_dict()))
    first = [versions(b.sample(50, 0.5)) for _ in range(3)]
    b.load_state_dict(saved)
    assert [versions(b.sample(50, 0.5)) for _ in range(3)] == first
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_an_empty_buffer_gives_nothing():
    assert buffer().sample(100, 0.5) == [] and buffer().newest_policy_version == -1


def test_the_newest_are_those_of_the_newest_version_within_the_bound():
    b = buffer()
    for version, length in ((1, 10), (2, 11), (2, 12), (2, 13)):
        b.add(make_document(length, length, version=version))
    assert [len(d) for d in b.newest(26)] == [13, 12]
    assert versions(b.newest(1000)) == [2, 2, 2] and buffer().newest(10) == []


def test_what_is_taken_out_for_a_while_comes_back_as_the_newest():
    documents = [make_document(length, length, version=1) for length in (12, 13, 14)]
    b = buffer(max_bytes=sum(d.nbytes for d in documents))
    for document in documents:
        b.add(document)
    taken = b.take_newest(20)
    assert [len(d) for d in taken] == [14] and b.tokens == 25 and len(b) == 2
    b.give_back(taken)
    assert b.tokens == 39 and [len(d) for d in b.newest(1000)] == [14, 13, 12]
    b.add(documents[0])  # its bytes count again: one leaves, and no more than that
    assert [len(d) for d in b.newest(1000)] == [12, 14, 13]


def test_something_is_left_to_learn_from():
    b = buffer()
    b.add(make_document(12, 12, version=1))
    assert b.take_newest(1000) == [] and len(b) == 1


def test_a_long_document_is_read_in_windows_although_there_is_a_short_one():
    b = HiddenBuffer(10_000, 1 << 30, 0)
    for n in (100, 12, 90):
        b.add(make_document(n, n))
    drawn = b.sample(60, 0.25)
    assert len(drawn) == 2 and sum(map(len, drawn)) == 60, "the short one, and a window of one that is too long"
    assert len(b.sample(20, 0.25)) == 1, "where more than half is filled nothing is cut"
