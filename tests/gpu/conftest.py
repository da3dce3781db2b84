"""What a maintainer with a card runs in ten minutes. Without one all of it is skipped, in one line, or rehearsed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import on_card
import pytest
import small
import torch
from spec_plugin_conformance import tiny

from draft_training.config import DraftConfig
from draft_training.eagle3 import save_draft


def pytest_runtest_setup() -> None:
    """Skipped from here, and not by a mark on each test, so that pytest's summary has one line for all."""
    if not (on_card.HERE or on_card.REHEARSED):
        pytest.skip(on_card.NO_CARD)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return tiny.make_target(folder, dtype=on_card.DTYPE, num_key_value_heads=2)


@pytest.fixture(scope="session")
def config(target: Path) -> DraftConfig:
    return small.draft_config(target)


@pytest.fixture(scope="session")
def policy(target: Path) -> Any:
    """In transformers, on the card."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target, dtype=on_card.DTYPE).to(on_card.DEVICE).eval()


@pytest.fixture(scope="module")
def started(target: Path, config: DraftConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[on_card.Started]:
    """The engine of a file's tests; its draft is random."""
    draft = tmp_path_factory.mktemp("drafts") / "draft"
    save_draft(draft, config, on_card.in_dtype(small.draft_tensors(config, seed=1)))
    started = on_card.start(target, draft, sleeps=True)
    started.set_k(on_card.K)
    yield started
    started.close()


@pytest.fixture
def good(config: DraftConfig) -> dict[str, torch.Tensor]:
    """The draft that knows the policy."""
    return on_card.in_dtype(small.good_tensors(config))
