"""What the two wheels would hold, and what a process meets that has one of them installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[2]
CPU = ROOT / "adapters" / "cpu"
#: a distribution's project file, and the folders of its packages
PROJECTS = {
    "spec-plugin": (ROOT, [ROOT / "spec_plugin", ROOT / "draft_training", *(ROOT / "adapters").glob("spec_plugin_*")]),
    "spec-plugin-cpu": (CPU, [folder for folder in CPU.glob("spec_plugin_*") if folder.suffix != ".egg-info"]),
}


def settings(name: str) -> dict[str, Any]:
    return tomllib.loads((PROJECTS[name][0] / "pyproject.toml").read_text())


@pytest.mark.parametrize("name", PROJECTS)
def test_every_package_of_ours_is_in_its_wheel(name: str) -> None:
    found = {
        ".".join(file.parent.relative_to(root.parent).parts)
        for root in PROJECTS[name][1]
        for file in root.rglob("__init__.py")
    }
    listed = settings(name)["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(found) and len(found) > 4


@pytest.mark.parametrize("name", PROJECTS)
def test_every_file_that_is_read_at_run_time_is_in_its_wheel(name: str) -> None:
    listed = settings(name)["tool"]["setuptools"]["package-data"]
    files = [
        (root, file) for root in PROJECTS[name][1] for file in root.rglob("*.*") if file.suffix not in (".py", ".pyc")
    ]
    assert len(files) > 2
    for root, file in files:
        assert file.name in listed[".".join(file.parent.relative_to(root.parent).parts)], file


def test_law_1_a_plain_install_has_no_entry_point_that_any_trainer_or_engine_loads_unasked() -> None:
    assert set(settings("spec-plugin")["project"]["entry-points"]) == {"spec_plugin_adapters"}
    ours = set(settings("spec-plugin-cpu")["project"]["entry-points"])
    assert ours == {"spec_plugin_conformance", "vllm.general_plugins"}


def test_the_two_distributions_are_of_one_version_and_the_plain_one_does_without_the_other() -> None:
    plain, cpu = (settings(name)["project"] for name in PROJECTS)
    assert plain["version"] == cpu["version"]
    assert cpu["dependencies"] == [f"spec-plugin[conformance]=={plain['version']}"]
    needed = [*plain["dependencies"], *(word for extra in plain["optional-dependencies"].values() for word in extra)]
    assert not [word for word in needed if "spec-plugin" in word]
