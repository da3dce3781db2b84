"""docs/develop/structure.md, where a line of code lives, says what the tree is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from builders.paths import ROOT

PAGE = (ROOT / "docs" / "develop" / "structure.md").read_text()
PACKAGE = ROOT / "spec_plugin"
ROOMS = sorted(folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists())
QUOTED = re.findall(r"`([\w/.]+)`", PAGE)
FILES = [word for word in QUOTED if "/" in word and not word.startswith(("spec-plugin", "_"))]
#: the numbered steps of a life, each with its continuation lines
STEPS = re.findall(r"^\d\. (.*?)(?=^\d\. |^$)", PAGE, re.M | re.S)


@pytest.mark.parametrize("file", sorted(set(FILES)))
def test_what_is_named_is_there(file: str) -> None:
    inside = [
        ROOT / file,
        *(folder / file for folder in PACKAGE.iterdir()),
    ]  # a room inside of a room goes by its own name
    assert any(place.exists() for place in inside), file


def test_every_room_has_a_row_and_says_for_itself_who_calls_it() -> None:
    for room in [*ROOMS, "engine/vllm"]:
        assert f"| `spec_plugin/{room}/` |" in PAGE, room
        said = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())) or ""
        sentences = re.split(r"[.;] ", said.replace("\n", " "))
        assert len(sentences) >= 3 and ("Called by" in said or "Called through" in said), f"{room}: {said}"


def test_no_module_stands_outside_of_a_room_but_the_door() -> None:
    assert sorted(file.name for file in PACKAGE.glob("*.py")) == ["__init__.py", "adapter.py"]


def test_no_two_modules_of_the_package_that_a_run_loads_have_one_name() -> None:
    rooms = [room for room in ROOMS if room != "commands"]
    names = [file.stem for room in rooms for file in (PACKAGE / room).rglob("*.py") if file.stem != "__init__"]
    assert sorted({name for name in names if names.count(name) > 1}) == []


@pytest.mark.parametrize("step", STEPS)
def test_a_step_of_a_life_names_what_its_files_have(step: str) -> None:
    quoted = re.findall(r"`([\w/.]+)`", step)
    files = [ROOT / word for word in quoted if word.endswith(".py") and "/" in word]
    assert files, step
    files += [files[0].with_name(word) for word in quoted if word.endswith(".py") and "/" not in word]
    text = "".join(Path(file).read_text() for file in files)
    for name in quoted:
        if not name.endswith(".py"):
            assert name.rpartition(".")[2] in text, f"{name} is in none of {[str(f.relative_to(ROOT)) for f in files]}"


def test_the_lives_are_as_short_as_they_say() -> None:
    lives = dict(re.findall(r"^## The life of (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
    assert {life: len(re.findall(r"^\d\. ", text, re.M)) for life, text in lives.items()} == {
        "a token's log-prob": 8,
        "a hidden state": 6,
        "a draft's weights": 6,
    }
