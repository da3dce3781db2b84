"""One mutation: a mistake that a colleague could make in this repository, and the tests that must notice it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: where the tests lie that a mutation names, in rooms
TESTS = "tests/unit"


class NotApplicable(ValueError):
    """The sources have changed, and the mutation has not."""


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


@dataclass(frozen=True)
class Mutation:
    """Text of one file, and what it becomes."""

    file: str  # from the root of the repository
    text: str  # is found exactly once
    becomes: str
    breaks: str  # what a run would lose, in one line
    tests: tuple[
        str, ...
    ]  # ``file.py`` or ``file.py::test`` in any room, elsewhere with its folders; one of them must fail

    def applied(self, source: str) -> str:
        """The file's text with the mistake in it.

        Raises:
            NotApplicable: if the text is not found exactly once.
        """
        found = source.count(self.text)
        if found != 1:
            raise NotApplicable(f"{self.file}: the text of '{self.breaks}' is found {found} times: {self.text!r}")
        return source.replace(self.text, self.becomes)

    def paths(self) -> list[str]:
        """The tests, as pytest takes them in the repository's root.

        Raises:
            NotApplicable: if a file is not found exactly once.
        """
        return [path_of(file) + colons + test for file, colons, test in (name.partition("::") for name in self.tests)]
