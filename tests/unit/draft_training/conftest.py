from __future__ import annotations

import pytest
import torch
from builders.drafts import TINY

from draft_training import DraftConfig


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def tiny() -> DraftConfig:
    return DraftConfig.from_target(TINY)


@pytest.fixture
def pruned() -> DraftConfig:
    return DraftConfig.from_target(TINY, draft_vocab_size=12)
