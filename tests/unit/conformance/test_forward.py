from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from spec_plugin_conformance.forward import Pack, compare, judge_packs, plain_forward
from spec_plugin_conformance.tiny import tiny_config
from transformers import Qwen3ForCausalLM

LAYERS = (2, 4, 5)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    torch.manual_seed(0)
    config = tiny_config(vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=1)
    folder = tmp_path_factory.mktemp("target")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pack(target):
    ids = [torch.arange(1, 8), torch.arange(20, 25)]
    states = plain_forward(target, ids, LAYERS, torch.float32)
    aux, last = (torch.cat([s[i] for s in states]) for i in (0, 1))
    return Pack(torch.cat(ids), aux, last, torch.ones(12, dtype=torch.bool), (7, 5), 0)


def changed(pack: Pack, **what) -> Pack:
    return Pack(**{**pack.__dict__, **what})


def test_the_same_states_pass(target, pack):
    assert judge_packs([pack], target, LAYERS, ["float32"]) == []


def test_a_shift_by_one_token_is_seen(target, pack):
    wrong = changed(pack, aux=pack.aux.roll(1, 0))
    assert any("at token" in p for p in judge_packs([wrong], target, LAYERS, ["float32"]))


def test_a_shift_by_one_token_is_seen_with_bfloat16s_tolerance_too(target, pack):
    wrong = changed(pack, last=pack.last.roll(-1, 0))
    assert any("final norm" in p and "at token" in p for p in judge_packs([wrong], target, LAYERS, ["bfloat16"]))


def test_the_next_layers_input_is_seen(target, pack):
    assert judge_packs([pack], target, (3, 5, 6), ["float32"]) != []


@pytest.mark.parametrize("step", [-1, 1])
def test_a_neighbouring_layers_input_is_seen_within_bfloat16s_tolerance_too(target, pack, step):
    documents = [pack.input_ids[d] for d in pack.documents()]
    states = plain_forward(target, documents, [layer + step for layer in LAYERS], torch.float32)
    nudged = pack.aux + 0.01 * (torch.cat([aux for aux, _ in states]) - pack.aux)
    assert not [p for p in judge_packs([changed(pack, aux=nudged)], target, LAYERS, ["bfloat16"]) if "wrong layer" in p]
    wrong = changed(pack, aux=torch.cat([aux for aux, _ in states]))
    found = [p for p in judge_packs([wrong], target, LAYERS, ["bfloat16"]) if "wrong layer" in p]
    assert len(found) == len(LAYERS) and f"against layer {2 + step}" in found[0]


def test_documents_that_see_each_other_are_seen(target, pack):
    together = plain_forward(target, [pack.input_ids], LAYERS, torch.float32)[0]
    assert judge_packs([changed(pack, aux=together[0])], target, LAYERS, ["float32"]) != []


def test_states_before_the_final_norm_are_seen(target, pack):
    assert judge_packs([changed(pack, last=pack.aux[:, :32])], target, LAYERS, ["float32"]) != []


def test_shapes_nan_and_states_that_prove_nothing_are_seen():
    a = torch.randn(4, 6)
    assert "shape" in compare("x", a[:3], a, 0.1)[0]
    assert "relative error" in compare("x", a * float("nan"), a, 0.1)[0]
    same = torch.ones(4, 6)
    assert "so alike" in compare("x", same, same, 0.1)[0]


def parts_of(pack: Pack) -> tuple[Pack, list[list[int]]]:
    """Of each document all but its first three tokens and its last one, and the sequences that they are of."""
    sequences = [pack.input_ids[d].tolist() for d in pack.documents()]
    rows = torch.cat([torch.arange(d.start + 3, d.stop - 1) for d in pack.documents()])
    lengths = tuple(n - 4 for n in pack.lengths)
    cut = {name: getattr(pack, name)[rows] for name in ("input_ids", "aux", "last", "loss_mask")}
    return replace(pack, **cut, lengths=lengths, offsets=(3,) * len(lengths)), sequences


def test_a_part_of_a_document_is_judged_behind_what_stands_before_it(target, pack):
    parts, sequences = parts_of(pack)
    assert judge_packs([parts], target, LAYERS, ["float32"], sequences) == []
    assert "at token 0" in judge_packs([replace(parts, offsets=())], target, LAYERS, ["float32"], sequences)[0]
    wrong = replace(parts, aux=parts.aux.roll(1, 0))
    assert any("at token" in p for p in judge_packs([wrong], target, LAYERS, ["float32"], sequences))


def test_a_part_of_what_nobody_sampled_is_seen(target, pack):
    parts, sequences = parts_of(pack)
    moved = replace(parts, offsets=(2,) * len(parts.lengths))
    assert "no sampled sequence has these" in judge_packs([moved], target, LAYERS, ["float32"], sequences)[0]


def test_only_documents_that_hold_a_whole_response_say_how_long_it_is(pack):
    parts, sequences = parts_of(pack)
    assert parts.masks(sequences)["masks"] == []
    (first, *_), n = parts.documents(), len(sequences[0])
    ended = replace(parts, loss_mask=torch.arange(len(parts.loss_mask)) > 0)
    assert ended.masks([sequences[0][: n - 1]])["masks"][0] == ended.loss_mask[first].tolist()
