"""The extension's own part of law 5: whatever is wrong with a file, every rank reaches the verdict. No engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from draft_training import digest
from spec_plugin.engine.vllm import extension
from spec_plugin.engine.vllm.extension import SpecWorkerExtension


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
    worker.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(draft_sample_method="greedy"))
    runner = SimpleNamespace(get_model=lambda: torch.nn.Linear(2, 2))
    worker.model_runner, worker.get_draft_model, worker.verdicts = runner, lambda: draft, verdicts
    return worker


TENSORS = {"fc.weight": torch.ones(4, 4)}


@pytest.fixture
def file(tmp_path):
    save_file(TENSORS, tmp_path / "draft.safetensors")
    return tmp_path / "draft.safetensors"


def test_a_refresh_from_a_file_is_installed(worker, file):
    report = worker.spec_install_file(str(file), 1, digest(TENSORS), ["fc.weight"])
    assert report["installed"] and report["draft_version"] == 1 and report["digest"] == digest(TENSORS)
    assert worker.verdicts == [True, True, True], "is the file there; before and after the swap"


def test_a_file_that_cannot_be_read_becomes_a_refusal_on_every_rank(worker, file):
    file.write_bytes(file.read_bytes()[:-20])
    report = worker.spec_install_file(str(file), 1, digest(TENSORS), ["fc.weight"])
    assert not report["installed"] and "SafetensorError" in report["reason"]
    assert worker.verdicts == [True, False]


def test_a_check_that_crashes_becomes_a_refusal_on_every_rank(worker, file, monkeypatch):
    monkeypatch.setattr(extension, "draft_layout", lambda *_: 1 / 0)
    report = worker.spec_install_file(str(file), 1, digest(TENSORS), ["fc.weight"])
    assert not report["installed"] and "ZeroDivisionError" in report["reason"] and worker.verdicts == [True, False]


@pytest.mark.parametrize("names", [[], ["fc.weight", "gone.weight"]])
def test_other_names_than_the_sender_sent_are_refused(worker, file, names):
    report = worker.spec_install_file(str(file), 1, digest(TENSORS), names)
    assert not report["installed"] and "torn" in report["reason"]


def test_without_a_draft_everything_answers(worker, file):
    worker.get_draft_model = lambda: None
    worker.spec_look_at_draft()
    assert "no draft model" in worker.spec_install_file(str(file), 1, "", [])["reason"]


@pytest.mark.parametrize("place", ["drafter", "speculator"])
def test_the_draft_is_found_on_both_runners_of_vllm_0_24(place):
    draft = Draft()
    wrapper = SimpleNamespace(unwrap=lambda: draft)
    for model in (draft, wrapper):
        worker = SimpleNamespace(model_runner=SimpleNamespace(**{place: SimpleNamespace(model=model)}))
        assert extension.find_draft(worker) is draft
    assert extension.find_draft(SimpleNamespace(model_runner=SimpleNamespace(drafter=SimpleNamespace()))) is None
