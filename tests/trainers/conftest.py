"""What the tests of real verl start from."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, Path]:
    """A barely taught policy, its data, and a folder for the runs."""
    from examples.quickstart.data import build_data  # OpenRLHF's tests do without it
    from examples.quickstart.policy import PolicySettings, build_policy

    root = tmp_path_factory.mktemp("verl")
    settings = PolicySettings(steps=60)
    policy = build_policy(root / "policy", settings, show=False)
    train, val = build_data(root / "data", settings, train=64, val=8)
    return root, policy, train, val
