from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders.batches import whole_batch, witness_of

from spec_plugin.api.errors import LogprobProvenanceError
from spec_plugin.api.witness import witnessed

DOCUMENTS = [torch.tensor([1, 2, 3, 4, 5]), torch.tensor([1, 2, 7, 8]), torch.tensor([9, 9, 9, 9])]
STARTS = [2, 2, 1]


def test_a_request_is_found_by_its_tokens_and_nothing_else_is_said():
    found = witnessed(
        whole_batch(3, 3),
        DOCUMENTS,
        STARTS,
        [witness_of((1, 2, 7, 8), (-0.5, -0.6)), witness_of((1, 2, 3, 9), (-1.0,))],
    )
    assert found is not None and found.rollout is not None
    assert found.recomputed.tolist() == whole_batch(3, 3).recomputed[1:2].tolist()
    assert found.mask.tolist() == [[True, True, False]] and found.rollout[0, :2].tolist() == pytest.approx([-0.5, -0.6])
    assert found.versions.tolist() == [[3] * 3] and found.speculating


def test_the_turns_of_a_conversation_are_prefixes_of_its_document():
    said = [witness_of((1, 2, 3), (-0.1,)), witness_of((1, 2, 3, 4, 5), (-0.2,))]  # 4 came from a tool
    found = witnessed(whole_batch(3, 3), DOCUMENTS, STARTS, said)
    assert found is not None and found.rollout is not None
    assert found.mask.tolist() == [[True, False, True]]
    assert found.rollout[0, [0, 2]].tolist() == pytest.approx([-0.1, -0.2])


def test_tokens_that_the_policy_did_not_sample_are_not_checked():
    asked = whole_batch(3, 3)
    asked.mask[0, 1:] = False
    found = witnessed(asked, DOCUMENTS, STARTS, [witness_of((1, 2, 3, 4, 5), (-0.1, -0.2, -0.3))])
    assert found is not None and found.mask.tolist() == [[True, False, False]]


def test_a_response_that_began_before_the_first_column_is_cut():
    found = witnessed(whole_batch(3, 3), DOCUMENTS, STARTS, [witness_of((9, 9, 9), (-0.1, -0.2, -0.3))])
    assert found is not None and found.rollout is not None
    assert found.mask.tolist() == [[True, True, False]] and found.rollout[0, :2].tolist() == pytest.approx([-0.2, -0.3])


def test_without_a_witness_there_is_nothing_to_check():
    assert witnessed(whole_batch(3, 3), DOCUMENTS, STARTS, [witness_of((5, 5), (-1.0,))]) is None
    assert witnessed(whole_batch(3, 3), DOCUMENTS, STARTS, []) is None


def test_law_3_wrong_log_probs_are_caught_although_the_trainer_never_sees_them():
    from builders.provenance import guard

    asked = whole_batch(20, 9)
    documents = [torch.tensor([1, i, *range(9)]) for i in range(20)]
    right = [witness_of(tuple(d.tolist()), tuple(r.tolist())) for d, r in zip(documents, asked.recomputed, strict=True)]
    wrong = [replace(w, stated=(w.log_probs - 0.5).numpy().tobytes()) for w in right]
    for kept, caught in ((right[:16], False), (wrong[:16], True)):
        found = witnessed(asked, documents, [2] * 20, kept)
        assert found is not None and len(found.mask) == 16
        if caught:
            with pytest.raises(LogprobProvenanceError):
                guard().spec_check_logprobs(batch=found)
        else:
            guard().spec_check_logprobs(batch=found)
