from __future__ import annotations

import math
import random
import statistics

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from spec_plugin.trainer.decoder import find_decoder
from spec_plugin.trainer.harvest import harvested, padded_rows, responses_at_the_end
from spec_plugin.trainer.harvest_plan import HarvestPlan
from spec_plugin.trainer.taps import Taps

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


@pytest.mark.parametrize(("budget", "kept"), [(20, (7, 4, 9)), (19, (7, 4, 8)), (11, (7, 4)), (10, (7, 3)), (4, (4,))])
def test_the_budget_is_respected_to_the_token(model, documents, budget, kept):
    hidden = harvest(model, documents, plan=HarvestPlan(budget))
    assert hidden.lengths == kept
    assert len(hidden.input_ids) == len(hidden.aux) == len(hidden.last) == len(hidden.loss_mask) == sum(kept) <= budget


@pytest.mark.parametrize("run", [run_padded, run_packed])
def test_of_a_document_that_is_longer_than_what_is_left_a_part_from_anywhere_is_taken(model, documents, run):
    whole = harvest(model, documents, run)
    cut = harvest(model, documents, run, plan=HarvestPlan(3, window=3))
    (n,), (at,) = cut.lengths, cut.offsets
    assert n == 3 and cut.input_ids.tolist() == documents[0][at : at + 3].tolist()
    for name in ("aux", "last", "loss_mask"):
        assert torch.equal(getattr(cut, name), getattr(whole, name)[at : at + 3]), name
    assert harvest(model, documents, run, plan=HarvestPlan(0)) is None
    assert harvest(model, documents, run, plan=HarvestPlan(11)).lengths == (7, 4)


# ---- at the lengths of real responses


def steps_of(lengths, tokens, steps, window=8192, micro=2, prompt=0):
    """How often each token of documents of these lengths is harvested, over steps that each shuffle them into micro-batches."""
    plan, draw, passed = HarvestPlan(window=window), random.Random(3), None
    hits = [torch.zeros(n + 1) for n in lengths]
    masks, taken, hooked = [torch.arange(n) >= prompt for n in lengths], [], 0
    for _ in range(steps):
        plan.open(tokens, passed)
        order = draw.sample(range(len(lengths)), len(lengths))
        for at in range(0, len(order), micro):
            batch = order[at : at + micro]
            pieces = plan.pieces([masks[i] for i in batch])
            hooked += bool(pieces)
            for piece in pieces:
                hits[batch[piece.index]][piece.start] += 1
                hits[batch[piece.index]][piece.stop] -= 1
        taken.append(tokens - plan.left)
        passed = plan.passed
    return [found.cumsum(0)[:-1] for found in hits], taken, hooked / steps / math.ceil(len(lengths) / micro)


def lognormal(count):
    draw = random.Random(5)
    return [min(16_384, max(64, int(draw.lognormvariate(8.6, 0.7)))) for _ in range(count)]


@pytest.mark.parametrize(
    "lengths",
    [lognormal(16), [2000, *[8000] * 9], [16_384] * 8, [1100] * 64, [50] * 2000],
    ids=lambda n: f"{n[0]}x{len(n)}",
)
def test_each_token_is_harvested_as_often_as_any_other_however_long_its_response_and_wherever_in_it(lengths):
    steps = 300 if len(lengths) < 100 else 40
    rates, taken, hooked = steps_of(lengths, 16_384, steps)
    usual = sum(map(float, map(torch.sum, rates))) / sum(lengths)
    budget = min(16_384, sum(lengths))
    assert max(taken) <= 16_384 and statistics.fmean(taken[1:]) >= 0.93 * budget
    for third in range(3):
        parts = [rate[len(rate) * third // 3 : len(rate) * (third + 1) // 3] for rate in rates]
        found = sum(float(part.sum()) for part in parts) / sum(map(len, parts))
        assert found == pytest.approx(usual, rel=0.09), f"third {third} of the responses"
    middle = statistics.median(lengths)
    for long in (True, False):
        chosen = [i for i, n in enumerate(lengths) if (n > middle) == long]
        if chosen:
            found = sum(float(rates[i].sum()) for i in chosen) / sum(lengths[i] for i in chosen)
            assert found == pytest.approx(usual, rel=0.12), f"longer than the median: {long}"
    if sum(lengths) > 6 * budget:
        assert hooked < 0.75, "where nothing is taken of a micro-batch, nothing is hooked"


def test_of_a_long_prompt_only_what_is_near_the_response_is_harvested():
    rates, taken, _ = steps_of([9000] * 4, 1 << 20, 3, prompt=8800)
    assert taken == [4 * (200 + 1024)] * 3
    assert all(float(rate[: 8800 - 1024].sum()) == 0 and float(rate[8800 - 1024 :].min()) == 3 for rate in rates)
    rates, taken, _ = steps_of([12_000] * 4, 1 << 20, 3, prompt=8000)
    assert taken == [4 * 8000] * 3, "as much as was sampled, where that is more"


def test_a_pass_that_grows_or_shrinks_keeps_to_its_budget():
    plan = HarvestPlan(window=512)
    for expected, passes in ((None, 40_000), (40_000, 80_000), (80_000, 10_000), (10_000, 40_000)):
        plan.open(4096, expected)
        for _ in range(passes // 2000):
            plan.pieces([torch.ones(2000, dtype=torch.bool)])
        assert 0 <= plan.left <= 4096 - min(500, 4096 * passes // (expected or passes) - 1024) and plan.passed == passes


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
