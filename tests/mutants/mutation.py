"""One mutation: a mistake that a colleague could make in this repository, and the tests that must notice it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: where the tests lie that a mutation names, in rooms
TESTS = "tests/unit"
#: comments, strings, and all else that Python reads as one word; a fragment need not be a whole expression
_WORDS = re.compile(
    r"""(?P<comment>\#[^\n]*)
    |[rbfuRBFU]{0,2}(?:\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |\w+(?:\.\d\w*)?|\*\*=?|//=?|<<=?|>>=?|->|[-+*/%@&|^<>=!:]=|\S""",
    re.S | re.X,
)


class NotApplicable(ValueError):
    """The sources have changed, and the mutation has not."""


def words(text: str) -> list[tuple[str, int, int]]:
    """What Python reads, without comments and layout: each word with its first and last character's place."""
    return [(m.group(), m.start(), m.end()) for m in _WORDS.finditer(text) if m.group("comment") is None]


@cache
def path_of(name: str) -> str:
    """Where the test file with this name lies, from the repository's root; a name with folders is that path.

    Raises:
        NotApplicable: if it is not found exactly once under ``TESTS``.
    """
    if "/" in name:
        return name
    found = [path.relative_to(ROOT).as_posix() for path in (ROOT / TESTS).rglob(name)]
    if len(found) != 1:
        raise NotApplicable(f"{name} is found {len(found)} times under {TESTS}: {found}")
    return found[0]


@cache
def program(source: str) -> str:
    """What Python makes of it, whatever its layout."""
    return ast.dump(ast.parse(source))


@cache
def definitions(source: str) -> dict[str, tuple[int, int]]:
    """First and last line of each class and function, by its name with those around it: ``Class.method.inner``."""
    found: dict[str, tuple[int, int]] = {"": (1, source.count("\n") + 1)}

    def visit(node: ast.AST, outer: str) -> Iterator[None]:
        for child in ast.iter_child_nodes(node):
            name = outer
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{outer}.{child.name}" if outer else child.name
                found[name] = (min([child.lineno, *(d.lineno for d in child.decorator_list)]), child.end_lineno or 0)
            yield from visit(child, name)

    list(visit(ast.parse(source), ""))
    return found


@dataclass(frozen=True)
class Mutation:
    """Some words of one function, and what they become.

    The function is found in the syntax tree, the words by what Python reads: neither a formatter nor equal words in the
    next function, nor a comment between them, makes a mutation stale.
    """

    file: str  # from the root of the repository
    where: str  # ``function``, ``Class.method``, ``Class``, or nothing for the whole module
    text: str  # is found there exactly once
    becomes: str  # nothing: the words, or the statement, are gone
    breaks: str  # what a run would lose, in one line
    tests: tuple[str, ...]  # ``file.py`` or ``file.py::test`` in any room, elsewhere with its folders; one must fail

    def applied(self, source: str) -> str:
        """The file's text with the mistake in it.

        Raises:
            NotApplicable: if the words are not found exactly once, or leave the program as it is, or no program.
        """
        lines = definitions(source).get(self.where)
        if lines is None:
            raise NotApplicable(f"{self.file}: no {self.where}, in which '{self.breaks}' was to be")
        all_lines = source.splitlines(keepends=True)
        begin = sum(map(len, all_lines[: lines[0] - 1]))
        have = words("".join(all_lines[lines[0] - 1 : lines[1]]))
        spelt, wanted = [word for word, *_ in have], [word for word, *_ in words(self.text)]
        size = len(wanted)
        found = [i for i in range(len(spelt) - size + 1) if size and spelt[i : i + size] == wanted]
        if len(found) != 1:
            place = f"{self.file}, {self.where or 'module'}"
            raise NotApplicable(f"{place}: the text of '{self.breaks}' is found {len(found)} times: {self.text!r}")
        first, last = begin + have[found[0]][1], begin + have[found[0] + size - 1][2]
        for instead in dict.fromkeys((self.becomes.strip(), self.becomes.strip() or "pass")):
            made = source[:first] + instead + source[last:]
            try:
                if ast.dump(ast.parse(made)) != program(source):
                    return made
            except SyntaxError:
                continue
        raise NotApplicable(f"{self.file}: '{self.breaks}' makes the same program, or none")

    def paths(self) -> list[str]:
        """The tests, as pytest takes them in the repository's root.

        Raises:
            NotApplicable: if a file is not found exactly once.
        """
        return [path_of(file) + colons + test for file, colons, test in (name.partition("::") for name in self.tests)]
