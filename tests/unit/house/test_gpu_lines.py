"""tests/gpu/lines.toml: each line of ours that only a card runs is there, as it stands, with a test that runs it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomllib
from builders.paths import ROOT, TESTS

GPU = TESTS / "gpu"
PRODUCT = ("spec_plugin", "draft_training", "adapters", "projection")
#: how a branch for cards alone is written here
BRANCH = re.compile(r"\bis_cuda\b|\bis_cpu\b|\btorch\.cuda\.|[=!]= \"(?:cuda|cpu)\"")
ON_CPU = {"never", "half", "pretended"}


def branches() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads((GPU / "lines.toml").read_text())["branch"]
    return found


def unlisted(sources: dict[str, str], listed: list[dict[str, Any]]) -> Iterator[str]:
    """Lines that look like a branch for cards, and that no entry names."""
    for file, text in sources.items():
        known = {line for entry in listed if entry["file"] == file for line in entry["lines"]}
        for number, line in enumerate(text.splitlines(), 1):
            if BRANCH.search(line) and line.strip() not in known:
                yield f"{file}:{number}: {line.strip()}"


def written_in(folder: Path) -> set[str]:
    """``file::test`` of each test there, by their sources: no card is needed to know them."""
    return {
        f"{file.stem}::{node.name}"
        for file in folder.glob("test_*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def sources() -> dict[str, str]:
    return {str(f.relative_to(ROOT)): f.read_text() for room in PRODUCT for f in (ROOT / room).rglob("*.py")}


def test_each_branch_for_cards_is_in_the_list_with_a_test_of_tests_gpu() -> None:
    """A new one: write its test under tests/gpu, rehearse it, and name both in tests/gpu/lines.toml."""
    assert list(unlisted(sources(), branches())) == []


@pytest.mark.parametrize("entry", branches(), ids=lambda entry: f"{Path(entry['file']).stem}-{entry['tests'][0][9:40]}")
def test_what_the_list_names_is_there(entry: dict[str, Any]) -> None:
    assert set(entry) == {"file", "lines", "on_cpu", "why", "tests"} and entry["on_cpu"] in ON_CPU and entry["why"]
    there = [line.strip() for line in (ROOT / entry["file"]).read_text().splitlines()]
    assert [line for line in entry["lines"] if line not in there] == []
    assert entry["tests"] and sorted(set(entry["tests"]) - written_in(GPU)) == []


def test_every_test_for_a_card_has_the_marker() -> None:
    files = list(GPU.glob("test_*.py"))
    assert len(files) > 4 and [f.name for f in files if "pytestmark = pytest.mark.gpu" not in f.read_text()] == []


@pytest.mark.parametrize(
    "line",
    [
        'if x.device.type == "cuda":',
        'kernel = slow if device.type != "cuda" else fast',
        "with torch.cuda.stream(side):",
        "if tensor.is_cuda:",
        'return 1 if device_type == "cpu" else 32',
    ],
)
def test_a_branch_that_nobody_listed_would_be_found(line: str) -> None:
    assert list(unlisted({"draft_training/new.py": f"def f():\n    {line}\n"}, branches()))


def test_the_page_says_how_many_there_are() -> None:
    lines = {kind: sum(len(e["lines"]) for e in branches() if e["on_cpu"] == kind) for kind in ON_CPU}
    said = f"{sum(lines.values())} lines in {len(branches())} entries: " + ", ".join(
        f"{lines[kind]} {kind}" for kind in ("never", "half", "pretended")
    )
    assert said in (ROOT / "docs" / "develop" / "gpu.md").read_text(), said
