"""The extension's own part of law 5: whatever the transport does, every rank reaches the verdict. No engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from draft_training import digest
from spec_plugin.engine import extension
from spec_plugin.engine.extension import SpecWorkerExtension


class Draft(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 4, bias=False)

    def load_weights(self, weights):
        for _, tensor in weights:
            self.fc.weight.data.copy_(tensor)


@pytest.fixture
def worker(monkeypatch):
    draft, verdicts = Draft(), []
    monkeypatch.setattr(extension, "_all_ranks", lambda ok: verdicts.append(ok) or ok)
    worker = object.__new__(SpecWorkerExtension)
    worker._spec_state = extension._State()
    runner = SimpleNamespace(get_model=lambda: torch.nn.Linear(2, 2))
    worker.model_runner, worker.get_draft_model, worker.verdicts = runner, lambda: draft, verdicts
    return worker


TENSORS = {"fc.weight": torch.ones(4, 4)}


def test_a_refresh_from_a_transport_is_installed(worker):
    assert worker.spec_receive(1, lambda on_bucket: on_bucket(list(TENSORS.items()), True)) == 1
    report = worker.spec_install(1, digest(TENSORS), ["fc.weight"])
    assert report["installed"] and report["draft_version"] == 1 and report["digest"] == digest(TENSORS)
    assert worker.verdicts == [True, True], "before and after the swap"


def test_a_transport_that_fails_becomes_a_refusal_on_every_rank(worker):
    def receive(on_bucket):
        on_bucket(list(TENSORS.items()))
        raise TimeoutError("the sender is gone")

    worker.spec_receive(1, receive)
    report = worker.spec_install(1, digest(TENSORS))
    assert not report["installed"] and "the sender is gone" in report["reason"]
    assert worker.verdicts == [False]


def test_a_check_that_crashes_becomes_a_refusal_on_every_rank(worker, monkeypatch):
    monkeypatch.setattr(extension, "draft_layout", lambda *_: 1 / 0)
    worker.spec_stage(1, list(TENSORS.items()))
    report = worker.spec_install(1, digest(TENSORS))
    assert not report["installed"] and "ZeroDivisionError" in report["reason"] and worker.verdicts == [False]


def test_what_cannot_be_staged_is_said_at_the_end_and_not_in_the_receiver(worker):
    assert worker.spec_stage(1, [("fc.weight", "no tensor")]) == 0
    assert "AttributeError" in worker.spec_install(1, "")["reason"]


def test_a_refused_refresh_is_not_kept(worker):
    worker.spec_stage(1, list(TENSORS.items()))
    assert not worker.spec_install(1, "0" * 64)["installed"]
    assert not worker.spec_install(1, digest(TENSORS))["installed"], "nothing is staged any more"


def test_without_a_draft_everything_answers(worker):
    worker.get_draft_model = lambda: None
    assert worker.spec_draft_info()["has_draft"] is False
    assert worker.spec_lost_draft() is False
    assert "no draft model" in worker.spec_install(1, "")["reason"]


@pytest.mark.parametrize("place", ["drafter", "speculator"])
def test_the_draft_is_found_on_both_runners_of_vllm_0_24(place):
    draft = Draft()
    wrapper = SimpleNamespace(unwrap=lambda: draft)
    for model in (draft, wrapper):
        worker = SimpleNamespace(model_runner=SimpleNamespace(**{place: SimpleNamespace(model=model)}))
        assert extension.find_draft(worker) is draft
    assert extension.find_draft(SimpleNamespace(model_runner=SimpleNamespace(drafter=SimpleNamespace()))) is None
