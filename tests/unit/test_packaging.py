"""What the three wheels would hold, and what a process meets that has one of them installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[2]
CPU, TRL = ROOT / "adapters" / "cpu", ROOT / "adapters" / "trl"
#: a distribution's project file, and the folders of its packages
PROJECTS = {
    "spec-plugin": (ROOT, [ROOT / "spec_plugin", ROOT / "draft_training", *(ROOT / "adapters").glob("spec_plugin_*")]),
    "spec-plugin-testing": (CPU, [folder for folder in CPU.glob("spec_plugin_*") if folder.suffix != ".egg-info"]),
    "spec-plugin-trl": (TRL, [TRL / "spec_plugin_trl"]),
}
#: of which setuptools is told each package and file; hatchling takes all that is in a package
LISTED = ("spec-plugin", "spec-plugin-testing")


def settings(name: str) -> dict[str, Any]:
    return tomllib.loads((PROJECTS[name][0] / "pyproject.toml").read_text())


@pytest.mark.parametrize("name", LISTED)
def test_every_package_of_ours_is_in_its_wheel(name: str) -> None:
    found = {
        ".".join(file.parent.relative_to(root.parent).parts)
        for root in PROJECTS[name][1]
        for file in root.rglob("__init__.py")
    }
    listed = settings(name)["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(found) and len(found) > 4


@pytest.mark.parametrize("name", LISTED)
def test_every_file_that_is_read_at_run_time_is_in_its_wheel(name: str) -> None:
    listed = settings(name)["tool"]["setuptools"]["package-data"]
    files = [
        (root, file) for root in PROJECTS[name][1] for file in root.rglob("*.*") if file.suffix not in (".py", ".pyc")
    ]
    assert len(files) > 2
    for root, file in files:
        assert file.name in listed[".".join(file.parent.relative_to(root.parent).parts)], file


def test_all_of_the_package_for_trl_and_its_start_up_file_are_in_its_wheel() -> None:
    built = settings("spec-plugin-trl")
    assert built["build-system"]["build-backend"] == "hatchling.build"
    wheel = built["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["spec_plugin_trl"], "force-include": {"spec_plugin_trl.pth": "spec_plugin_trl.pth"}}
    assert {"__init__.py", "py.typed", "log.json"} <= {file.name for file in (TRL / "spec_plugin_trl").iterdir()}


def test_law_1_the_start_up_file_asks_for_the_variable_before_it_imports_anything() -> None:
    (line,) = (TRL / "spec_plugin_trl.pth").read_text().splitlines()
    assert line.startswith('import os; os.environ.get("SPEC_PLUGIN_TRL") and ')


def test_law_1_a_plain_install_has_no_entry_point_that_any_trainer_or_engine_loads_unasked() -> None:
    for name in ("spec-plugin", "spec-plugin-trl"):
        assert set(settings(name)["project"]["entry-points"]) == {"spec_plugin_adapters"}
    ours = set(settings("spec-plugin-testing")["project"]["entry-points"])
    assert ours == {"spec_plugin_conformance", "vllm.general_plugins"}


def test_the_distributions_are_of_one_version_and_the_plain_one_does_without_the_others() -> None:
    plain, cpu, trl = (settings(name)["project"] for name in PROJECTS)
    assert plain["version"] == cpu["version"] == trl["version"]
    assert cpu["dependencies"] == [f"spec-plugin[conformance]=={plain['version']}"]
    assert trl["dependencies"][0] == f"spec-plugin=={plain['version']}"
    needed = [*plain["dependencies"], *(word for extra in plain["optional-dependencies"].values() for word in extra)]
    assert not [word for word in needed if "spec-plugin" in word]
