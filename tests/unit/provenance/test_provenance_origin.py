"""Law 3, exactly: each row in the loss is one that an engine of this run has answered, with the log-probs that it stated."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from builders.batches import span_of
from builders.law6_faults import FakeLink, Fault
from builders.training import TARGET
from torch import Tensor

from spec_plugin import LogprobProvenanceError, SpecConfig
from spec_plugin.api.spans import FORGOTTEN, Span, Spans
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.trainer.log_probs import Responses
from spec_plugin.trainer.spec_run import SpecRun

PROMPT = [5, 6, 7]
#: four responses of one prompt, and what the engine stated of each: the last is nearly sure
ANSWERS = [[10, 11, 12, 13], [20, 21, 22, 23], [10, 11, 22, 24], [30, 31, 32, 33]]
STATED = torch.tensor(
    [[-0.5, -2.0, -0.25, -1.0], [-1.5, -0.125, -3.0, -0.5], [-0.75, -1.75, -2.5, 0.0], [-0.01, 0.0, -1e-4, 0.0]]
)


class NoHarvest:
    def open(self) -> None: ...


class Engines(FakeLink):
    """Which have answered all of it."""

    forgotten = False

    async def spans(self) -> list[Span]:
        said = [span_of(PROMPT, a, 0, log_probs=row.tolist()) for a, row in zip(ANSWERS, STATED, strict=True)]
        return [*said, *[FORGOTTEN] * self.forgotten]


def run_of(link: Engines | None = None, **options: object) -> SpecRun:
    session = SpecSession(
        SpecConfig.parse({"method": "ngram", "self_test": False, "serve": "always", **options}),
        TARGET,
        create_manager(load_entry_points=False),
    )
    run = SpecRun(session, link or Engines(Fault()), harvest=lambda _: NoHarvest())  # type: ignore[arg-type, return-value]
    asyncio.run(run.weights_synced(0, None, None))
    asyncio.run(run.rollouts_end())
    return run


def rows(
    answers: Sequence[Sequence[int]] = ANSWERS, rollout: Tensor | None = STATED, mask: Tensor | None = None
) -> Responses:
    documents = [torch.tensor([*PROMPT, *answer]) for answer in answers]
    mask = torch.tensor([[i < len(a) for i in range(4)] for a in answers]) if mask is None else mask
    zero = torch.zeros(len(answers), dtype=torch.int64)
    return Responses(documents, [3] * len(answers), mask, rollout, (zero, zero))


def test_what_the_engine_has_answered_passes_in_any_order():
    run, order = run_of(), [2, 0, 3, 1]
    run.check(rows([ANSWERS[i] for i in order], STATED[order]), STATED[order])
    run.check_stated(rows())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_what_a_dtype_rounds_is_no_difference(dtype):
    run_of().check_stated(rows(rollout=STATED.to(dtype)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("nats", [1.0, 1e-2])
def test_law_3_of_16k_tokens_one_wrong_log_prob_is_refused_in_each_dtype_and_none_is_where_all_are_right(dtype, nats):
    """A tolerance for each token's own rounding would come to 90 nats in bfloat16, and one that grew with the row hides it."""
    generator = torch.Generator().manual_seed(0)
    answer = torch.randint(10, 1000, (16_384,), generator=generator).tolist()
    stated = torch.randn(1, len(answer), generator=generator).abs().neg()
    spans = Spans()
    spans.add([span_of(PROMPT, answer, 0, log_probs=stated[0].tolist())], 0)
    wrong = stated.clone()
    wrong[0, 9000] -= nats
    document, mask = torch.tensor([*PROMPT, *answer]), torch.ones(1, len(answer), dtype=torch.bool)
    for rollout, refused in ((stated, False), (wrong, True)):
        carried = rollout.to(dtype)
        for again in (carried, carried.float()):  # which a trainer may widen before the loss
            assert bool(spans.of([document], [3], mask, rollout=again).apart > 0) is refused


def test_sums_that_another_machine_adds_up_in_another_order_are_no_difference():
    said = span_of(PROMPT, ANSWERS[0], 0, log_probs=STATED[0].tolist())
    assert said.stated is not None
    spans = Spans()
    spans.add([replace(said, stated=tuple(math.nextafter(value, 0.0) for value in said.stated))], 0)
    document = torch.tensor([*PROMPT, *ANSWERS[0]])
    assert not spans.of([document], [3], torch.ones(1, 4, dtype=torch.bool), rollout=STATED[:1]).apart.any()


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "of other rows": lambda s: s[[1, 0, 2, 3]],
    "shifted by one": lambda s: torch.cat([s[:2], s[2:3].roll(1, -1), s[3:]]),
    "shifted by one, of a sure row": lambda s: torch.cat([s[:3], s[3:].roll(1, -1)]),
    "backwards": lambda s: torch.cat([s[:1].flip(-1), s[1:]]),
    "none": lambda s: torch.zeros_like(s),
    "none of the last row": lambda s: torch.cat([s[:3], torch.zeros(1, 4)]),
    "of another temperature": lambda s: s * 1.4,
    "a nat apart, that adds up to nothing": lambda s: s + torch.tensor([0.0, -1e-3, 1e-3, 0.0]) * (s < -0.2),
}


@pytest.mark.parametrize("how", WRONG)
def test_law_3_log_probs_that_are_not_the_engines_own_are_refused_without_a_tolerance(how):
    with pytest.raises(LogprobProvenanceError, match="not those that the engine stated"):
        run_of(logprob_tolerance=1e9).check_stated(rows(rollout=WRONG[how](STATED)))


FOREIGN: dict[str, Sequence[Sequence[int]]] = {
    "edited": [[10, 11, 12, 14]],
    "tokenised again": [[10, 11, 99, 12, 13][:4]],
    "its end stripped": [[20, 21, 22]],
    "of another run": [[7, 7, 7, 7]],
    "with a token added": [[20, 21, 22], [30, 31, 32, 33]],
}


@pytest.mark.parametrize("how", FOREIGN)
@pytest.mark.parametrize("shown", [True, False])
def test_law_3_a_row_that_no_engine_has_sampled_is_refused(how, shown):
    answers = FOREIGN[how]
    stated = torch.zeros(len(answers), 4) if shown else None
    with pytest.raises(LogprobProvenanceError, match="no engine of this run has sampled"):
        run_of().check(rows(answers, stated), torch.zeros(len(answers), 4))


def test_what_the_adapter_says_to_have_cut_is_not_held_against_it_and_the_rest_is():
    run, zeros = run_of(), torch.zeros(2, 4)
    cut = rows([[20, 21, 22], [30, 31, 32, 33]], None)
    run.check(replace(cut, cut=torch.tensor([True, False])), zeros)
    with pytest.raises(LogprobProvenanceError, match="sequence 0 from position 0"):
        run.check(replace(cut, cut=torch.tensor([False, True])), zeros)


def test_a_trainer_that_replays_on_purpose_says_so():
    run_of(unsampled_rows="allow").check(rows(FOREIGN["of another run"], None), torch.zeros(1, 4))


def test_nothing_is_held_against_rows_that_an_engine_may_have_forgotten_but_their_log_probs():
    link = Engines(Fault())
    link.forgotten = True
    run = run_of(link)
    run.check(rows(FOREIGN["of another run"], None), torch.zeros(1, 4))
    with pytest.raises(LogprobProvenanceError, match="not those that the engine stated"):
        run.check_stated(rows(rollout=STATED[[1, 0, 2, 3]]))


def test_where_the_mask_leaves_tokens_out_their_log_probs_may_be_anything():
    mask = torch.tensor([[True, False, True, True]] * 4)
    run_of().check_stated(rows(rollout=STATED * mask, mask=mask))


def test_law_6_engines_that_do_not_say_what_they_sampled_stop_nothing():
    link = Engines(Fault())

    async def spans() -> list[Span]:
        raise RuntimeError("an engine that does not answer")

    link.spans = spans  # type: ignore[method-assign]
    run = run_of(link)
    run.check(rows(FOREIGN["of another run"], None), torch.zeros(1, 4))
    assert run.session.failed
