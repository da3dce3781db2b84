from __future__ import annotations

import json
import random

import pytest
import torch
from builders.drafts import make_document
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_training import Document, HiddenBuffer
from draft_training.parts import Part, stretch, teeth


def buffer(max_tokens: int = 1000, max_bytes: int = 1 << 30, seed: int = 0) -> HiddenBuffer:
    return HiddenBuffer(max_tokens, max_bytes, seed)


def versions(parts: list[Part]) -> list[int]:
    return [part.document.policy_version for part in parts]


@given(st.lists(st.integers(3, 60), max_size=12), st.integers(10, 80), st.integers(3_000, 30_000))
@settings(max_examples=30, deadline=None)
def test_the_buffer_never_exceeds_its_bounds(lengths, max_tokens, max_bytes):
    b = buffer(max_tokens, max_bytes)
    for i, n in enumerate(lengths):
        b.add(make_document(n, i, i, prompt=1))
        held = b.sample(1000, 0.5)
        assert len(held) == len(b) and sum(map(len, held)) == b.tokens <= max_tokens
        assert sum(part.cut().nbytes for part in held) <= max_bytes


def test_the_oldest_documents_leave_first():
    b = buffer(max_tokens=30)
    for version in range(5):
        b.add(make_document(10, version, version))
    assert sorted(versions(b.sample(100, 0.5))) == [2, 3, 4]


def test_of_a_document_beyond_the_bound_a_part_from_anywhere_is_kept():
    big, starts = make_document(50, 0), set()
    for seed in range(40):
        b = buffer(max_tokens=12, seed=seed)
        assert b.add(big)
        (kept,) = b.sample(100, 0.0)
        assert 6 <= len(kept) <= 12 and torch.equal(kept.cut().aux, big.aux[kept.document.offset :][: len(kept)])
        starts.add(kept.document.offset // 10)
    assert starts >= {0, 1, 2, 3}, "beginnings, middles and ends"


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
    assert torch.equal(b.sample(10, 0.0)[0].cut().aux, before)


def test_what_is_the_buffers_own_already_is_not_copied_once_more():
    b, d = buffer(), make_document(10, 0)
    b.add(d, owned=True)
    assert b.sample(10, 0.0)[0].document is d


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
        drawn = b.sample(20, 0.0)
        assert sum(map(len, drawn)) <= 20 and all(part.positions for part in drawn) and drawn
        starts |= {part.start for part in drawn}
    assert len(starts) > 10


def test_where_every_draw_ends_in_a_prompt_something_is_drawn_all_the_same():
    b = buffer()
    b.add(
        Document(
            *(make_document(5000, 0).__dict__[n] for n in ("input_ids", "aux", "last")), torch.arange(5000) >= 4997, 0
        )
    )
    drawn = [b.sample(16, 0.0) for _ in range(50)]
    assert all(len(parts) == 1 and parts[0].positions for parts in drawn)


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


def test_tokens_are_counted_where_they_were_sampled_and_a_prompts_come_behind_all_of_those():
    b = buffer()
    assert b.token_counts(10).tolist() == [0.0] * 10
    for ids in ([7, 7, 7, 7, 1, 2, 1], [7, 3, 1, 1, 1, 2, 1]):
        n = len(ids)
        b.add(Document(torch.tensor(ids), torch.zeros(n, 2), torch.zeros(n, 2), torch.arange(n) > 3, 0))
    counts = b.token_counts(10)
    assert counts.round().tolist() == [0, 4, 2, 0, 0, 0, 0, 0, 0, 0]
    assert counts.argsort(descending=True, stable=True)[:5].tolist() == [1, 2, 7, 3, 0]


def test_an_empty_buffer_gives_nothing():
    assert buffer().sample(100, 0.5) == [] and buffer().newest_policy_version == -1


def test_the_newest_are_those_of_the_newest_version_within_the_bound():
    b = buffer()
    for version, length in ((1, 10), (2, 11), (2, 12), (2, 13)):
        b.add(make_document(length, length, version=version))
    assert versions(b.newest(1000, 100)) == [2, 2, 2] and buffer().newest(10, 5) == []
    for _ in range(50):
        found = b.newest(26, 13)
        assert versions(found) == [2] * len(found) and 12 <= sum(map(len, found)) <= 26


# ---- at the lengths of real responses: tensors are narrow, since only their number of tokens matters here


def narrow(n: int, version: int = 0, prompt: int = 0) -> Document:
    empty = torch.zeros(n, 0)
    return Document(torch.arange(n), empty, empty, torch.arange(n) >= prompt, version)


def lognormal(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [min(16_384, max(64, int(draw.lognormvariate(7.6, 1.2)))) for _ in range(count)]


@pytest.mark.parametrize(
    "lengths",
    [[2000, *[8000] * 9], [16_384] * 4, [1100] * 40, lognormal(64, 1), [50] * 400],
    ids=["one short", "16k", "1100", "log-normal", "50"],
)
@pytest.mark.parametrize("kind", ["a step", "a deep step", "the judge"])
def test_each_token_is_drawn_as_often_as_any_other_however_long_its_document_and_wherever_in_it(lengths, kind):
    documents, draw = [narrow(n) for n in lengths], random.Random(2)
    hits = {id(d): torch.zeros(len(d) + 1) for d in documents}
    tokens = {"a step": 8192, "a deep step": 3072, "the judge": 1024}[kind]
    draws = 1500 if len(documents) < 100 else 200
    for _ in range(draws):
        parts = teeth(documents, tokens, 256, draw) if kind == "the judge" else stretch(documents, tokens, draw)
        assert sum(map(len, parts)) <= tokens
        for part in parts:
            hits[id(part.document)][part.start] += 1
            hits[id(part.document)][part.stop] -= 1
    rates = {i: found.cumsum(0)[:-1] for i, found in hits.items()}
    usual = sum(float(rate.sum()) for rate in rates.values()) / sum(lengths)
    assert usual >= 0.85 * draws * min(1.0, tokens / sum(lengths)), "draws are full"
    # thirds of documents, and long ones against short ones: equally often within what chance allows
    thirds = [
        sum(float(rate[len(rate) * i // 3 : len(rate) * (i + 1) // 3].sum()) for rate in rates.values())
        for i in range(3)
    ]
    sizes = [sum(n * (i + 1) // 3 - n * i // 3 for n in lengths) for i in range(3)]
    for found, size in zip(thirds, sizes, strict=True):
        assert found / size == pytest.approx(usual, rel=0.08)
    middle = sorted(lengths)[len(lengths) // 2]
    for long in (True, False):
        chosen = [d for d in documents if (len(d) > middle) == long]
        if sum(map(len, chosen)) > 0.02 * sum(lengths):
            found = sum(float(rates[id(d)].sum()) for d in chosen) / sum(map(len, chosen))
            assert found == pytest.approx(usual, rel=0.12)


def test_parts_of_the_judge_come_from_as_many_places_as_there_is_room_for():
    b = buffer(max_tokens=1 << 20)
    for _ in range(8):
        b.add(narrow(16_384))
    parts = b.newest(1024, 256)
    assert len(parts) >= 4 and len({(id(p.document), p.start // 4096) for p in parts}) >= 4
    cut = parts[0].cut(context=512)
    assert len(cut) == len(parts[0]) + min(512, parts[0].start)
    assert int(cut.loss_mask.sum()) == len(parts[0]) and cut.offset == parts[0].start - min(512, parts[0].start)


@pytest.mark.parametrize(("lengths", "rest"), [([16_384] * 2, 15), ([40] * 100, 14)], ids=["long", "short"])
def test_what_the_judge_holds_back_is_not_trained_on_and_comes_back(lengths, rest):
    b = buffer(max_tokens=1 << 20)
    for n in lengths:
        b.add(narrow(n))
    held, total = b.newest(b.tokens // 16, 64), b.tokens
    taken = {(id(p.document.aux), t) for p in held for t in p.document.input_ids[p.start : p.stop].tolist()}
    with b.without(held):
        left = b.sample(1 << 20, 0.0)
        seen = {(id(p.document.aux), t) for p in left for t in p.cut().input_ids.tolist()}
        assert not taken & seen or len(lengths) == 2, "whole documents where they are short"
        assert total * rest / 16 - 200 <= sum(map(len, left)) <= total - sum(map(len, held))
    assert sum(map(len, b.sample(1 << 20, 0.0))) == total == b.tokens


def test_of_a_long_document_what_is_held_back_is_cut_out_and_the_rest_stays():
    b = buffer(max_tokens=1 << 20)
    b.add(narrow(16_384))
    held = b.newest(1024, 256)
    with b.without(held):
        left = {t for part in b.sample(1 << 20, 0.0) for t in part.cut().input_ids.tolist()}
    gone = {t for part in held for t in range(part.start, part.stop)}
    assert left | gone == set(range(16_384)) and not left & gone


def test_something_is_left_to_learn_from_when_little_is_there():
    b = buffer()
    b.add(make_document(12, 12, version=1))
    held = b.newest(int(0.125 * b.tokens), 256)
    with b.without(held):
        assert b.sample(100, 0.0)
