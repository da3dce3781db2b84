from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders.batches import kept_of, whole_batch
from torch import Tensor

from spec_plugin.api.errors import LogprobProvenanceError
from spec_plugin.api.events import LogprobBatch
from spec_plugin.api.spans import Span
from spec_plugin.trainer.log_probs import Responses, with_kept_log_probs

DOCUMENTS = [torch.tensor([1, 2, 3, 4, 5]), torch.tensor([1, 2, 7, 8]), torch.tensor([9, 9, 9, 9])]
STARTS = [2, 2, 1]


def witnessed(
    batch: LogprobBatch, spans: Sequence[Span], documents: Sequence[Tensor] = DOCUMENTS, starts: Sequence[int] = STARTS
) -> LogprobBatch | None:
    return with_kept_log_probs(batch, Responses(documents, starts, batch.mask, None), spans)


def test_a_request_is_found_by_its_tokens_and_nothing_else_is_said():
    found = witnessed(whole_batch(3, 3), [kept_of((1, 2, 7, 8), (-0.5, -0.6)), kept_of((1, 2, 3, 9), (-1.0,))])
    assert found is not None and found.rollout is not None
    assert found.recomputed.tolist() == whole_batch(3, 3).recomputed[1:2].tolist()
    assert found.mask.tolist() == [[True, True, False]] and found.rollout[0, :2].tolist() == pytest.approx([-0.5, -0.6])
    assert found.versions.tolist() == [[3] * 3] and found.speculating


def test_the_turns_of_a_conversation_are_prefixes_of_its_document():
    said = [kept_of((1, 2, 3), (-0.1,)), kept_of((1, 2, 3, 4, 5), (-0.2,))]  # 4 came from a tool
    found = witnessed(whole_batch(3, 3), said)
    assert found is not None and found.rollout is not None
    assert found.mask.tolist() == [[True, False, True]]
    assert found.rollout[0, [0, 2]].tolist() == pytest.approx([-0.1, -0.2])


def test_tokens_that_the_policy_did_not_sample_are_not_checked():
    asked = whole_batch(3, 3)
    asked.mask[0, 1:] = False
    found = witnessed(asked, [kept_of((1, 2, 3, 4, 5), (-0.1, -0.2, -0.3))])
    assert found is not None and found.mask.tolist() == [[True, False, False]]


def test_a_response_that_began_before_the_first_column_is_cut():
    found = witnessed(whole_batch(3, 3), [kept_of((9, 9, 9), (-0.1, -0.2, -0.3))])
    assert found is not None and found.rollout is not None
    assert found.mask.tolist() == [[True, True, False]] and found.rollout[0, :2].tolist() == pytest.approx([-0.2, -0.3])


def test_where_the_engines_have_kept_none_there_is_nothing_to_check():
    assert witnessed(whole_batch(3, 3), [kept_of((5, 5), (-1.0,))]) is None
    assert witnessed(whole_batch(3, 3), []) is None


def test_law_3_wrong_log_probs_are_caught_although_the_trainer_never_sees_them():
    from builders.provenance import guard

    asked = whole_batch(20, 9)
    documents = [torch.tensor([1, i, *range(9)]) for i in range(20)]
    right = [kept_of(tuple(d.tolist()), tuple(r.tolist())) for d, r in zip(documents, asked.recomputed, strict=True)]
    wrong = [replace(w, log_probs=(np.frombuffer(w.log_probs) - 0.5).tobytes()) for w in right]
    for kept, caught in ((right[:16], False), (wrong[:16], True)):
        found = witnessed(asked, kept, documents, [2] * 20)
        assert found is not None and len(found.mask) == 16
        if caught:
            with pytest.raises(LogprobProvenanceError):
                guard().spec_check_logprobs(batch=found)
        else:
            guard().spec_check_logprobs(batch=found)
