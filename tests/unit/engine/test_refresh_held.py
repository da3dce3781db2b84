"""Law 5 in one worker: the previous draft is held until all engines agree, and comes back bit for bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draft_training import digest
from spec_plugin.engine.refresh.layout import Layout, Slot, draft_layout
from spec_plugin.engine.refresh.swap import check_arrived, swap
from spec_plugin.engine.vllm import extension
from spec_plugin.engine.vllm.extension import SpecWorkerExtension


class Draft(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 4, bias=False)

    def load_weights(self, weights: Any) -> None:
        for _, tensor in weights:
            self.fc.weight.data.copy_(tensor)


@pytest.fixture
def worker(monkeypatch, tmp_path) -> Any:
    draft = Draft()
    monkeypatch.setattr(extension, "_all_ranks", bool)
    out: Any = object.__new__(SpecWorkerExtension)
    out._spec_state = extension._State()
    out.model_runner = SimpleNamespace(get_model=lambda: torch.nn.Linear(2, 2))
    out.get_draft_model = lambda: draft
    out.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2), speculative_config=None)
    out.file = tmp_path / "draft.safetensors"
    return out


def install(worker: Any, version: int, tensors: dict[str, torch.Tensor], **options: bool) -> dict[str, Any]:
    save_file(tensors, worker.file)
    report: dict[str, Any] = worker.spec_install_file(
        str(worker.file), version, digest(tensors), list(tensors), **options
    )
    return report


def installed(worker: Any, version: int, hold: bool = False) -> dict[str, Any]:
    report = install(worker, version, {"fc.weight": torch.full((4, 4), float(version))}, hold=hold)
    assert report["installed"], report["reason"]
    return report


def served(worker: Any) -> tuple[int, str, float]:
    state = worker._spec_state.served
    return state.version, state.digest, worker.get_draft_model().fc.weight[0, 0].item()


def lost(worker: Any) -> bool:
    """As an audit says it of a worker that holds a shard."""
    return bool(worker._spec_held_digest(worker._spec_layout()) == "not what was installed")


@pytest.mark.parametrize(("keep", "version"), [(True, 2), (False, 1)])
def test_law_5_a_draft_that_is_held_stays_or_goes_with_its_version_and_digest(worker, keep, version):
    digests = {v: installed(worker, v, hold=v == 2)["digest"] for v in (1, 2)}
    worker.spec_settle(keep)
    assert served(worker) == (version, digests[version], float(version))
    assert not lost(worker)
    worker.spec_settle(False)
    assert served(worker)[0] == version, "what was settled is settled"


def test_a_draft_that_nobody_asked_to_hold_cannot_be_taken_back(worker):
    installed(worker, 1)
    installed(worker, 2)
    worker.spec_settle(False)
    assert served(worker)[0] == 2


def test_law_5_weights_that_are_no_longer_those_that_were_installed_are_noticed(worker):
    installed(worker, 1)
    assert not lost(worker)
    with torch.no_grad():
        worker.get_draft_model().fc.weight.zero_()  # as sleep level 2 does
    assert lost(worker)
    assert install(worker, 1, {"fc.weight": torch.ones(4, 4)}, force=True)["installed"]
    assert not lost(worker)


def test_law_5_kernels_are_told_that_the_previous_weights_are_back():
    draft, told = Draft(), []
    before = draft.fc.weight.detach().clone()
    layout = draft_layout(draft, torch.nn.Linear(2, 2))

    def load(weights: Any) -> None:
        draft.load_weights(weights)
        raise RuntimeError("out of memory")

    reason = swap(layout, {"fc.weight": torch.ones(4, 4)}, load, settle=lambda: told.append(draft.fc.weight.clone()))
    assert "out of memory" in (reason or "")
    assert told and torch.equal(told[-1], before)


@pytest.mark.parametrize(("last", "fits"), [(9, True), (10, False), (-1, False), (0, False)])
def test_law_5_a_pruned_draft_maps_each_of_its_tokens_to_one_of_the_targets(last, fits):
    """On a card a token beyond the vocabulary is an assertion that no process survives."""
    layout = Layout({"d2t": Slot("d2t", "d2t", (2,), torch.int64)}, {}, frozenset(), vocab_size=10)
    tensors = {"d2t": torch.tensor([0, last - 1])}
    reason = check_arrived(layout, tensors, 1, 0, digest(tensors))
    assert (reason is None) == fits and ("d2t" in (reason or "d2t"))


def test_buffers_that_sleep_dropped_come_back_with_the_refresh(worker):
    draft = worker.get_draft_model()
    table = torch.arange(6.0)
    draft.register_buffer("cos_sin_cache", table.clone())
    worker.spec_look_at_draft()
    before = draft.cos_sin_cache.data_ptr()
    draft.cos_sin_cache.fill_(float("nan"))
    installed(worker, 1)
    assert torch.equal(draft.cos_sin_cache, table) and draft.cos_sin_cache.data_ptr() == before
    draft.cos_sin_cache.zero_()
    installed(worker, 2)
    assert torch.equal(draft.cos_sin_cache, table), "each time, and not as they were before the first refresh only"


def test_law_5_a_refresh_whose_buffers_cannot_be_restored_is_refused(worker, monkeypatch):
    worker.get_draft_model().register_buffer("cos_sin_cache", torch.arange(6.0))
    installed(worker, 1)
    worker._spec_state.constants["cos_sin_cache"] = (torch.ones(7), "another")
    report = install(worker, 2, {"fc.weight": torch.full((4, 4), 2.0)})
    assert not report["installed"] and "while loading" in report["reason"]
    assert served(worker)[::2] == (1, 1.0)
