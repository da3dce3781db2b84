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


def test_every_file_that_is_read_at_run_time_is_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    roots = [ROOT / "spec_plugin", ROOT / "draft_training", *(ROOT / "adapters").glob("spec_plugin_*")]
    files = [
        (root, file) for root in roots for file in root.rglob("*.*") if file.suffix not in (".py", ".pyc", ".typed")
    ]
    assert len(files) > 2
    for root, file in files:
        assert file.name in listed[".".join(file.parent.relative_to(root.parent).parts)], file
