from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from spec_plugin.actor.decoder import find_decoder
from spec_plugin.actor.harvest import HarvestPlan, harvested, padded_rows, responses_at_the_end
from spec_plugin.actor.taps import Taps

AUX = (1, 3, 4)
LENGTHS = (7, 4, 9)
RESPONSES = (3, 2, 5)
H, V = 32, 61


@pytest.fixture(params=["qwen3", "qwen2", "llama", "mistral"])
def model(request):
    sizes = {"hidden_size": H, "intermediate_size": 48, "num_hidden_layers": 6, "vocab_size": V, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    torch.manual_seed(0)
    options = {"attn_implementation": "sdpa", "tie_word_embeddings": False, "sliding_window": None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **sizes, **heads, **options))
    torch.nn.init.uniform_(model.model.norm.weight, 0.5, 2.0)  # so that before and after the final norm differ
    return model.eval()


@pytest.fixture
def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(V, (n,), generator=generator) for n in LENGTHS]


@torch.no_grad()
def run_padded(model, documents, **kwargs):
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    attention = torch.arange(ids.shape[1])[None] < torch.tensor([[len(d)] for d in documents])
    return model(input_ids=ids, attention_mask=attention.long(), use_cache=False, **kwargs)


@torch.no_grad()
def run_packed(model, documents):
    positions = torch.cat([torch.arange(len(d)) for d in documents])[None]
    return model(input_ids=torch.cat(documents)[None], position_ids=positions, use_cache=False)


def harvest(model, documents, run=run_padded, plan=None):
    taps = Taps.of(find_decoder(model), AUX)
    with taps.attached():
        run(model, documents)
    return packed(taps, documents, plan)


def packed(taps, documents, plan=None):
    masks = responses_at_the_end(documents, RESPONSES[: len(documents)])
    return harvested(taps, (documents, masks), plan or HarvestPlan(1000), policy_version=5)


def hooks(model) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def test_aux_is_what_enters_the_layers_and_last_is_behind_the_final_norm(model, documents):
    reference = run_padded(model, documents, output_hidden_states=True)
    hidden = harvest(model, documents)
    rows = [(i, t) for i, n in enumerate(LENGTHS) for t in range(n)]
    want_aux = torch.stack([torch.cat([reference.hidden_states[layer][i, t] for layer in AUX]) for i, t in rows])
    assert torch.equal(hidden.aux, want_aux)
    assert torch.equal(hidden.last, torch.stack([reference.hidden_states[-1][i, t] for i, t in rows]))
    logits = torch.stack([reference.logits[i, t] for i, t in rows])
    torch.testing.assert_close(hidden.last @ model.lm_head.weight.T, logits)


def test_documents_lengths_response_mask_and_version_are_those_of_the_batch(model, documents):
    hidden = harvest(model, documents)
    assert torch.equal(hidden.input_ids, torch.cat(documents))
    assert hidden.lengths == LENGTHS and hidden.policy_version == 5
    want = [t >= n - r for n, r in zip(LENGTHS, RESPONSES, strict=True) for t in range(n)]
    assert hidden.loss_mask.tolist() == want


def test_padded_and_packed_passes_give_the_same_documents(model, documents):
    padded, packed = harvest(model, documents), harvest(model, documents, run_packed)
    assert torch.equal(padded.input_ids, packed.input_ids) and padded.lengths == packed.lengths
    assert torch.equal(padded.loss_mask, packed.loss_mask)
    torch.testing.assert_close(padded.aux, packed.aux, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(padded.last, packed.last, rtol=1e-4, atol=1e-5)


def test_rows_that_are_padded_on_the_left_give_the_same_documents_from_where_they_begin(model, documents):
    longest = max(LENGTHS)
    starts = [
        longest + 2 - n for n in LENGTHS
    ]  # and two columns behind the end of each, as behind a shorter completion
    ids, mask = torch.zeros(len(LENGTHS), longest + 4, dtype=torch.long), torch.zeros(len(LENGTHS), longest + 4)
    for row, keep, start, document in zip(ids, mask, starts, documents, strict=True):
        row[start : start + len(document)], keep[start : start + len(document)] = document, 1
    places = (mask.cumsum(-1) - 1).clamp(min=0).long()
    taps = Taps.of(find_decoder(model), AUX)
    with taps.attached(), torch.no_grad():
        model(input_ids=ids, attention_mask=mask.long(), position_ids=places, use_cache=False)
    found = documents, responses_at_the_end(documents, RESPONSES)
    left = harvested(taps, found, HarvestPlan(1000), rows=padded_rows(starts, LENGTHS))
    right = harvest(model, documents)
    assert torch.equal(left.input_ids, right.input_ids) and left.lengths == right.lengths
    torch.testing.assert_close(left.aux, right.aux, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(left.last, right.last, rtol=1e-4, atol=1e-5)


def test_padded_rows_that_a_pass_did_not_have_are_refused():
    for shape, starts, lengths in (((2, 5, 3), [0], [5]), ((2, 5, 3), [0, 2], [5, 4])):
        with pytest.raises(RuntimeError, match=r"begin in the columns \[0"):
            padded_rows(starts, lengths)(torch.zeros(shape))


def test_law_4_what_is_harvested_is_detached_from_the_policys_graph(model, documents):
    taps = Taps.of(find_decoder(model), AUX)
    with taps.attached():
        model(input_ids=documents[0][None], use_cache=False)
    hidden = packed(taps, documents[:1])
    assert not hidden.aux.requires_grad and not hidden.last.requires_grad


def test_hooks_are_there_only_inside_capture(model):
    before = hooks(model)
    with Taps.of(find_decoder(model), AUX).attached():
        assert hooks(model) == before + len(AUX) + 1
    assert hooks(model) == before


def test_hooks_are_gone_after_an_exception_too(model):
    before = hooks(model)
    with pytest.raises(KeyError), Taps.of(find_decoder(model), AUX).attached():
        raise KeyError("out of memory, say")
    assert hooks(model) == before


def test_the_policys_output_is_bitwise_the_same_with_and_without_capture(model, documents):
    plain = run_padded(model, documents).logits
    with Taps.of(find_decoder(model), AUX).attached():
        captured = run_padded(model, documents).logits
    assert torch.equal(plain, captured)


@pytest.mark.parametrize(("budget", "kept"), [(20, (7, 4, 9)), (19, (7, 4)), (11, (7, 4)), (10, (7,)), (4, (4,))])
def test_the_budget_is_respected_and_documents_are_never_cut(model, documents, budget, kept):
    hidden = harvest(model, documents, plan=HarvestPlan(budget))
    assert hidden.lengths == kept
    assert len(hidden.input_ids) == len(hidden.aux) == len(hidden.last) == len(hidden.loss_mask) == sum(kept) <= budget


@pytest.mark.parametrize("run", [run_padded, run_packed])
def test_of_documents_that_are_all_longer_than_the_whole_budget_the_end_of_the_first_is_taken(model, documents, run):
    whole = harvest(model, documents, run)
    cut = harvest(model, documents, run, plan=HarvestPlan(3))
    n = len(documents[0])
    assert cut.lengths == (3,) and cut.input_ids.tolist() == documents[0][-3:].tolist()
    for name in ("aux", "last", "loss_mask"):
        assert torch.equal(getattr(cut, name), getattr(whole, name)[n - 3 : n]), name
    assert harvest(model, documents, run, plan=HarvestPlan(0)) is None
    assert harvest(model, documents, run, plan=HarvestPlan(10)).lengths == (7,)


def test_nothing_that_fits_is_none(model, documents):
    plan = HarvestPlan(6)
    assert harvest(model, documents, plan=plan).lengths == (4,)
    assert harvest(model, documents, plan=plan) is None, "two tokens are left, and no document is cut to fit"


def test_taking_without_a_forward_pass_or_twice_is_an_error(model, documents):
    taps = Taps.of(find_decoder(model), AUX)
    with pytest.raises(RuntimeError, match="no hidden states were captured"):
        packed(taps, documents)
    with taps.attached():
        run_padded(model, documents)
    packed(taps, documents)
    with pytest.raises(RuntimeError, match="no hidden states were captured"):
        packed(taps, documents)


def test_states_that_do_not_fit_the_documents_are_refused(model, documents):
    taps = Taps.of(find_decoder(model), AUX)
    with taps.attached():
        run_padded(model, documents[:2])
    with pytest.raises(RuntimeError, match="do not fit documents"):
        packed(taps, documents)
