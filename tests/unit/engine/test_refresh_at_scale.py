"""Law 5 at 16 engines and a vocabulary of 152k: one draft of 32k tokens, narrow, for all of them, or for none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders.refresh_checks import Vocab, Weight
from safetensors.torch import save_file
from torch import nn

from draft_training import fingerprint
from spec_plugin.api.events import DraftRefresh, RefreshReport
from spec_plugin.engine.refresh.swap import live_digest
from spec_plugin.engine.vllm import extension
from spec_plugin.engine.vllm.extension import SpecWorkerExtension
from spec_plugin.trainer.links import EngineLink

ENGINES, V, KEPT, H = 16, 151_936, 32_000, 16


class Target(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens, self.lm_head = Vocab(V, V), Vocab(V, V)


class Eagle3Draft(nn.Module):
    """As vLLM's EAGLE-3 model with a head of its own: what of it grows with the vocabulary."""

    has_own_embed_tokens = False

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=V, draft_vocab_size=KEPT)
        self.model = nn.Module()
        self.model.embed_tokens = target.model.embed_tokens
        self.model.fc = Weight(16, 3 * 16)
        self.lm_head = Vocab(KEPT, KEPT)
        self.draft_id_to_target_id = nn.Parameter(torch.zeros(KEPT, dtype=torch.long), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        of = {
            "fc.weight": self.model.fc.weight,
            "lm_head.weight": self.lm_head.weight,
            "d2t": self.draft_id_to_target_id,
        }
        for name, tensor in weights:
            if name != "t2d":
                of[name].data.copy_(tensor)


class Engine:
    """A worker of vLLM's with our extension, behind the calls of an engine."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.worker: Any = object.__new__(SpecWorkerExtension)
        self.worker._spec_state = extension._State()
        self.worker.vllm_config = SimpleNamespace(speculative_config=None)
        self.worker.model_runner = SimpleNamespace(get_model=lambda: target)
        draft = Eagle3Draft(target)
        self.worker.get_draft_model = lambda: draft
        self.file = str(folder / "draft.safetensors")
        self.on_the_way: Mapping[str, Any] = {}  # what arrives of a tensor in its place

    async def spec_refresh(self, refresh: DraftRefresh, force: bool, hold: bool) -> RefreshReport:
        tensors = {**refresh.tensors, **self.on_the_way}
        save_file(tensors, self.file)
        said = self.worker.spec_install_file(
            self.file, refresh.draft_version, refresh.digest, list(tensors), force=force, hold=hold
        )
        return RefreshReport(said["installed"], said["draft_version"], said["digest"], 0.0, said["reason"])

    async def spec_settle(self, keep: bool) -> None:
        self.worker.spec_settle(keep)

    @property
    def served(self) -> tuple[int, str]:
        return self.worker._spec_state.served.version, live_digest(self.worker._spec_layout())


class Link(EngineLink):
    def call(self, engine: Any, method: str, *args: Any) -> Any:
        return getattr(engine, method)(*args)


def a_refresh(version: int) -> DraftRefresh:
    generator = torch.Generator().manual_seed(version)
    kept = torch.randperm(V, generator=generator)[:KEPT].sort().values
    tensors = {
        "fc.weight": torch.randn(16, 48, generator=generator),
        "lm_head.weight": torch.randn(KEPT, H, generator=generator),
        "d2t": kept - torch.arange(KEPT),
        "t2d": torch.zeros(V, dtype=torch.bool).index_fill_(0, kept, True),
    }
    return DraftRefresh(version, 1, tensors, fingerprint(tensors))


def test_law_5_all_engines_serve_a_draft_or_the_one_before_and_it_takes_a_second(
    monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(extension, "_all_ranks", bool)
    target = Target()
    engines = [Engine(target, tmp_path) for _ in range(ENGINES)]
    link = Link(engines, 60.0)
    assert asyncio.run(link.install(a_refresh(1), False)).installed
    began = time.process_time()
    report = asyncio.run(link.install(a_refresh(2), False))
    took = time.process_time() - began
    served = engines[0].served
    assert report.installed and served[0] == 2 and {e.served for e in engines} == {served}

    third = a_refresh(3)
    last = third.tensors["d2t"].clone()
    last[-2] = last[-1] + 1  # two tokens of the draft for one of the policy's
    engines[-1].on_the_way = {"d2t": last}
    report = asyncio.run(link.install(third, False))
    assert not report.installed and report.reason and f"engine {ENGINES - 1}" in report.reason
    assert {e.served for e in engines} == {served}, "fifteen of them had it already"
    assert took < 4.0, f"{took:.1f} s of CPU for {ENGINES} engines"  # 0.6 s where this was written


@pytest.mark.parametrize("place", [0, V * H // 2, V * H - 1])
def test_one_wrong_number_of_a_policys_whole_head_is_noticed_wherever_it_is(place: int) -> None:
    head = torch.randn(V, H, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    wrong = head.clone()
    wrong.view(-1).view(torch.int16)[place] ^= 1
    assert fingerprint({"lm_head.weight": head}) != fingerprint({"lm_head.weight": wrong})
