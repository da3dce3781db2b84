"""A checkpoint of a draft for a vocabulary of 152k, behind responses of 16k tokens: whole, small, soon written."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from builders.drafts import TINY

from draft_training import Document, DraftConfig, DraftTrainer, HiddenBuffer, TrainSettings, digest

V, KEPT, TOKENS, H = 151_936, 32_000, 16_384, TINY["hidden_size"]
SETTINGS = TrainSettings(tokens_per_step=128, warmup_steps=1, ttt_steps=2, first_steps=2)


def policy() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(V, H, generator=generator), torch.randn(V, H, generator=generator)


def filled(seed: int) -> HiddenBuffer:
    """Two responses of 16k tokens and one of 48."""
    found = HiddenBuffer(100_000, 1 << 30, seed)
    for i, n in enumerate((TOKENS, TOKENS, 48)):
        generator = torch.Generator().manual_seed(i)
        ids = torch.randint(0, V, (n,), generator=generator)
        aux, last = (torch.randn(n, width, generator=generator) for width in (3 * H, H))
        found.add(Document(ids, aux, last, torch.arange(n) >= 8, i))
    return found


def a_trainer(config: DraftConfig) -> DraftTrainer:
    t = DraftTrainer(config, SETTINGS, device="cpu", seed=3)
    t.update_policy(*policy(), 1)
    return t


def sizes(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def test_training_goes_on_bit_by_bit_and_what_is_written_does_not_grow_with_the_texts(tmp_path: Path) -> None:
    hf: dict[str, Any] = {**TINY, "vocab_size": V, "max_position_embeddings": 2 * TOKENS}
    config = replace(DraftConfig.from_target(hf), draft_vocab_size=KEPT)
    straight, buffer = a_trainer(config), filled(0)
    straight.select_vocabulary(torch.bincount(torch.randint(0, V, (TOKENS,)), minlength=V))
    straight.train_slice(buffer, 60, 1)
    began = time.process_time()
    straight.save(tmp_path / "c", {"buffer": buffer.state_dict()})
    took = time.process_time() - began
    again, other = a_trainer(config), filled(0)
    other.load_state_dict(again.load(tmp_path / "c")["buffer"])
    again.update_policy(*policy(), 1)
    for t, b in ((straight, buffer), (again, other)):
        t.train_slice(b, 60, 2)
    assert digest(again.engine_tensors()) == digest(straight.engine_tensors()) and again.draft_version == 3
    mine = sum(t.nbytes for t in straight.engine_tensors().values())
    assert sizes(tmp_path / "c") < 2 * mine + 100_000, "the draft, its optimizer's state, and no text"
    assert took < 2.0, f"{took:.2f} s of CPU"  # 0.05 s where this was written
