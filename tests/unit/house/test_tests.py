"""The order of the tests: what several files need lies in tests/builders, and pytest's options alone say where that is."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from builders.paths import TESTS

from spec_plugin.plan.sources import parsed

UNIT = TESTS / "unit"
#: what changes a list in place
EDITS = {"append", "extend", "insert", "remove", "pop", "clear"}


def imports_of_tests(tree: ast.AST) -> Iterator[str]:
    """Test modules that a file imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if any(part.startswith("test_") for part in name.split(".")))


def edits_of_the_path(tree: ast.AST) -> Iterator[str]:
    """What a file does to ``sys.path``; what a child's source in a text does is no matter of pytest's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in EDITS:
            changed: list[ast.expr] = [node.func.value]
        elif isinstance(node, ast.Assign | ast.Delete):
            changed = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            changed = [node.target]
        else:
            continue
        for target in changed:
            if ast.unparse(target.value if isinstance(target, ast.Subscript) else target) == "sys.path":
                yield ast.unparse(node)


@pytest.mark.parametrize("found_in", [imports_of_tests, edits_of_the_path])
def test_no_file_imports_a_test_module_or_edits_the_path(found_in: Callable[[ast.AST], Iterator[str]]) -> None:
    """A test module that is imported runs under two names, and is found only where pytest happens to have put its folder."""
    found = {str(file.relative_to(TESTS)): list(found_in(parsed(file.read_text()))) for file in TESTS.rglob("*.py")}
    assert len(found) > 300
    assert {file: what for file, what in found.items() if what} == {}


@pytest.mark.parametrize(
    ("source", "found_in"),
    [
        ("import test_a", imports_of_tests),
        ("def f():\n    from test_a import b", imports_of_tests),
        ("from engine import test_a", imports_of_tests),
        ("sys.path.insert(0, 'a')", edits_of_the_path),
        ("sys.path[:0] = ['a']", edits_of_the_path),
        ("sys.path += ['a']", edits_of_the_path),
        ("del sys.path[0]", edits_of_the_path),
    ],
)
def test_what_is_not_to_be_there_would_be_found(source: str, found_in: Callable[[ast.AST], Iterator[str]]) -> None:
    assert list(found_in(parsed(source)))


def test_no_two_test_files_share_a_name_and_each_lies_in_a_room() -> None:
    """pytest imports them by their names alone, and a mutant names them so."""
    files = list(UNIT.rglob("test_*.py"))
    assert [name for name, times in Counter(file.name for file in files).items() if times > 1] == []
    assert [file.name for file in files if file.parent == UNIT] == []


def test_no_room_is_taken_for_a_trainer() -> None:
    """pytest puts the folder of each test file on the path: beside one, a room called verl would be imported for the library."""
    assert {"verl", "openrlhf", "trl"} <= {room.name for room in (UNIT / "adapters").iterdir()}
    assert list((UNIT / "adapters").glob("*.py")) == []


def test_each_file_that_is_named_as_slow_is_there() -> None:
    named = (UNIT / "slow.txt").read_text().split()
    assert named == sorted(set(named)) and all((UNIT / f"{name}.py").is_file() for name in named)
