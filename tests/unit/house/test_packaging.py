"""What the three wheels hold, and what a process meets that has one of them installed."""

from __future__ import annotations

import ast
import re
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml
from builders.paths import ROOT
from packaging.requirements import Requirement

import spec_plugin
from spec_plugin.plan.sources import parsed

#: each distribution's project file, and where its packages are
PROJECTS = {
    "spec-plugin": (ROOT, (ROOT, ROOT / "adapters")),
    "spec-plugin-testing": (ROOT / "testing", (ROOT / "testing",)),
    "spec-plugin-projection": (ROOT / "projection", (ROOT / "projection",)),
}

#: modules whose distribution is named otherwise
NAMES = {"google": "protobuf", "hydra": "hydra-core", "PIL": "pillow", "yaml": "pyyaml"}
#: what no distribution of ours asks for, and why
NOT_ASKED_FOR = {
    "vllm": "the trainer pins it, and its CPU build has another name",
    "megatron": "of verl's Megatron actors alone, whose users have built it",
    "triton": "of the tests of vLLM's V2 runner without a card, which `make env` installs",
    **dict.fromkeys(
        ("verl", "openrlhf", "trl", "ray", "datasets", "peft", "pillow", "pandas"), "the trainer that is tested"
    ),
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
    ours = {"spec_plugin_adapters", "spec_plugin_adapter_commands", "spec_plugin_commands"}
    assert set(settings("spec-plugin")["project"]["entry-points"]) == ours
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


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported(folder: Path) -> set[str]:
    """Distributions of other makers that the Python files of a folder import, wherever in a file they do it."""
    found: set[str] = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(parsed(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(str(node.module))
    tops = {name.partition(".")[0] for name in found} - set(sys.stdlib_module_names)
    return {normal(NAMES.get(top, top)) for top in tops if not top.startswith(("spec_plugin", "draft_training"))}


def asked_for(name: str) -> set[str]:
    """What a distribution depends on, with its extras, and with what it gets by the main one of ours."""
    project, main = settings(name)["project"], settings("spec-plugin")["project"]
    extras = {extra for line in project["dependencies"] for extra in Requirement(line).extras if "spec-plugin" in line}
    lines = [*project["dependencies"], *main["dependencies"]]
    lines += [line for extra in extras for line in main["optional-dependencies"][extra]]
    lines += [line for extra in project.get("optional-dependencies", {}).values() for line in extra]
    return {normal(Requirement(line).name) for line in lines}


@pytest.mark.parametrize("name", PROJECTS)
def test_every_import_of_a_package_is_asked_for(name: str) -> None:
    folder, _ = PROJECTS[name]
    found = {package: imported(folder / package) for package in wheel(name)["packages"]}
    assert set().union(*found.values()) > {"torch"} or name == "spec-plugin-projection"
    excused = {"vllm", "megatron"} if name == "spec-plugin" else set(NOT_ASKED_FOR)
    missing = {package: names - asked_for(name) - excused for package, names in found.items()}
    assert not {package: names for package, names in missing.items() if names}


def test_an_import_inside_of_a_function_counts(tmp_path: Path) -> None:
    (tmp_path / "it.py").write_text(
        "import os\ndef f():\n    from yaml.nodes import Node\n    import spec_plugin.api\n"
    )
    assert imported(tmp_path) == {"pyyaml"}


def test_tensordict_is_asked_for_as_verl_asks_for_it() -> None:
    try:
        verls = [Requirement(line) for line in metadata.requires("verl") or ()]
    except metadata.PackageNotFoundError:
        pytest.skip("verl is not installed here")
    (theirs,) = {r.specifier for r in verls if r.name == "tensordict" and r.marker is None}
    (ours,) = [
        Requirement(line).specifier
        for line in settings("spec-plugin")["project"]["optional-dependencies"]["verl"]
        if line.startswith("tensordict")
    ]
    versions = [f"0.{minor}.{patch}" for minor in range(6, 14) for patch in range(4)]
    assert [v for v in versions if v in ours] == [v for v in versions if v in theirs] != []


@pytest.mark.parametrize("name", PROJECTS)
def test_an_index_is_told_who_for_whom_and_on_which_python(name: str) -> None:
    project = settings(name)["project"]
    assert (
        project["authors"] == [{"name": "the spec-plugin authors"}] and (PROJECTS[name][0] / project["readme"]).exists()
    )
    main = settings("spec-plugin")["project"]
    assert project["requires-python"] == main["requires-python"] and project["classifiers"] == main["classifiers"]
    claimed = {line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)}
    lowest = min(claimed, key=lambda version: int(version.partition(".")[2]))
    assert project["requires-python"] == f">={lowest}"
    for workflow, job in (("checks", "pythons"), ("release", "install")):
        text = (ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text()
        matrix = yaml.safe_load(text)["jobs"][job]["strategy"]["matrix"]
        assert claimed == set(matrix["python"]), f"{workflow}: what is not tested is not claimed"


@pytest.mark.parametrize("file", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda file: file.name)
def test_what_a_service_reads_is_yaml(file: Path) -> None:
    assert yaml.safe_load(file.read_text())


@pytest.mark.parametrize("name", PROJECTS)
def test_a_typed_package_says_so(name: str) -> None:
    assert not [
        package for package in wheel(name)["packages"] if not (PROJECTS[name][0] / package / "py.typed").exists()
    ]


def test_the_version_is_that_of_what_is_installed() -> None:
    assert spec_plugin.__version__ == metadata.version("spec-plugin") == settings("spec-plugin")["project"]["version"]


def test_each_entry_point_of_ours_leads_somewhere() -> None:
    for group, entries in settings("spec-plugin")["project"]["entry-points"].items():
        for value in entries.values():
            if group != "spec_plugin_adapters":  # importing one of those is the flag
                module, _, attribute = value.partition(":")
                assert not attribute or hasattr(import_module(module), attribute)
                assert import_module(module)
