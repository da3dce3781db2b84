"""What the three wheels hold, and what a process meets that has one of them installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomllib
from builders.paths import ROOT

#: each distribution's project file, and where its packages are
PROJECTS = {
    "spec-plugin": (ROOT, (ROOT, ROOT / "adapters")),
    "spec-plugin-testing": (ROOT / "testing", (ROOT / "testing",)),
    "spec-plugin-projection": (ROOT / "projection", (ROOT / "projection",)),
}


def settings(name: str) -> dict[str, Any]:
    return tomllib.loads((PROJECTS[name][0] / "pyproject.toml").read_text())


def wheel(name: str) -> dict[str, Any]:
    found: dict[str, Any] = settings(name)["tool"]["hatch"]["build"]["targets"]["wheel"]
    return found


@pytest.mark.parametrize("name", PROJECTS)
def test_every_package_of_ours_is_in_its_wheel_with_all_its_files(name: str) -> None:
    folder, places = PROJECTS[name]
    found = {str(file.parent.relative_to(folder)) for place in places for file in place.glob("*/__init__.py")}
    assert {package for package in found if Path(package).parts[0] != "tests"} == set(wheel(name)["packages"])


@pytest.mark.parametrize("name", PROJECTS)
def test_each_is_built_alike_and_brings_its_license(name: str) -> None:
    built = settings(name)
    assert built["build-system"]["build-backend"] == "hatchling.build" and built["project"]["license-files"] == [
        "LICENSE"
    ]
    assert (PROJECTS[name][0] / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_law_1_a_plain_install_has_no_entry_point_that_any_trainer_or_engine_loads_unasked() -> None:
    assert set(settings("spec-plugin")["project"]["entry-points"]) == {"spec_plugin_adapters"}
    assert not [*ROOT.glob("adapters/**/*.pth"), *ROOT.glob("testing/**/*.pth"), *ROOT.glob("projection/**/*.pth")]
    assert set(settings("spec-plugin-projection")["project"]["entry-points"]) == {"spec_plugin_commands"}
    ours = set(settings("spec-plugin-testing")["project"]["entry-points"])
    assert ours == {
        "spec_plugin_commands",
        "spec_plugin_conformance",
        "spec_plugin_cpu_repairs",
        "vllm.general_plugins",
    }


def test_the_distributions_are_of_one_version_and_the_plain_one_does_without_the_others() -> None:
    plain, *others = (settings(name)["project"] for name in PROJECTS)
    for other in others:
        assert other["version"] == plain["version"]
        assert other["dependencies"][0].replace("[report]", "") == f"spec-plugin=={plain['version']}"
    needed = [*plain["dependencies"], *(word for extra in plain["optional-dependencies"].values() for word in extra)]
    assert not [word for word in needed if "spec-plugin" in word]
