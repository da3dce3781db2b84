"""What leaves the draft trainer for the engines, and what stays in its buffer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders import training

from draft_training import digest, fingerprint
from spec_plugin.api.events import HiddenStates


@pytest.mark.parametrize(("audit", "told"), [(False, fingerprint), (True, digest)])
def test_law_5_the_draft_is_sent_in_the_engines_dtype_and_its_digest_is_of_what_is_sent(monkeypatch, audit, told):
    monkeypatch.setattr(training, "TARGET", replace(training.TARGET, dtype="bfloat16"))
    hooks = training.plugin(audit=audit)
    hooks.spec_weight_sync(event=training.sync(0))
    refresh = hooks.spec_draft_weights(event=training.sync(0))
    assert {t.dtype for t in refresh.tensors.values()} == {torch.bfloat16}
    assert refresh.digest == told(refresh.tensors)


@pytest.mark.parametrize("documents", [16, 24])
def test_text_on_which_a_newborn_draft_was_judged_is_learnt_from_later(documents):
    hooks = training.plugin(train_max_steps=1)
    hooks.spec_weight_sync(event=training.sync(0))
    n, h = 10 * documents, training.H
    states = torch.randn(n, 4 * h, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(n) % 10 >= 2
    ids = torch.arange(n) % training.V
    hooks.spec_target_forward(
        hidden=HiddenStates(ids, states[:, : 3 * h], states[:, 3 * h :], mask, (10,) * documents, 0)
    )
    hooks.spec_train_draft(step=1, seconds=30.0)
    metrics = hooks.spec_metrics()[0]
    assert metrics["spec/train_steps"] == 1 and metrics["spec/expected_acceptance"] >= 1.0
    assert metrics["spec/buffer_tokens"] == n
