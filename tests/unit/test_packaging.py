"""What a wheel would hold."""

from __future__ import annotations

from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[2]


def test_every_package_of_ours_is_in_the_wheel() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    roots = [ROOT / "spec_plugin", ROOT / "draft_training", *(ROOT / "adapters").glob("spec_plugin_*")]
    found = {
        ".".join(file.parent.relative_to(root.parent).parts) for root in roots for file in root.rglob("__init__.py")
    }
    assert listed == found
