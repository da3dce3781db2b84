from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _drafts_are_served_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
