"""The list of mistakes for ``make mutants`` stays applicable: each can still be made, and its tests are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from mutants import MUTATIONS
from mutants.mutation import ROOT, Mutation, NotApplicable

from spec_plugin.sources import parsed


@cache
def source(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def program(text: str) -> str:
    return ast.dump(parsed(text))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{Path(m.file).stem}: {m.breaks}")
def test_its_text_is_found_once_and_makes_another_program(mutation: Mutation) -> None:
    before = source(mutation.file)
    after = mutation.applied(before)
    assert program(after) != program(before)


@pytest.mark.parametrize("path", sorted({path for m in MUTATIONS for path in m.paths()}))
def test_the_tests_that_it_names_are_there(path: str) -> None:
    file, _, name = path.partition("::")
    text = source(file)
    assert "warm_run" not in text or name, "name the test: a whole file may start processes of its own"
    assert not name or re.search(rf"^(async )?def {name}\(", text, re.M)


def test_there_are_as_many_as_were_asked_for_and_no_two_are_the_same() -> None:
    assert len(MUTATIONS) >= 60
    assert len({(m.file, m.text, m.becomes) for m in MUTATIONS}) == len(MUTATIONS)
    assert len({(m.file, m.breaks) for m in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize("text", ["x = 2", "x = "])
def test_a_text_that_is_not_found_once_cannot_become_a_mistake(text: str) -> None:
    with pytest.raises(NotApplicable, match=f"found {'x = 1, x = 1'.count(text)} times"):
        Mutation("a.py", text, "y", "", ()).applied("x = 1, x = 1")
