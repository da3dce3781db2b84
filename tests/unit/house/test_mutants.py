"""How ``make mutants`` finds what it breaks, and that it takes no slow machine for a mistake that was noticed."""

from __future__ import annotations

import ast

import pytest
from mutants import MUTATIONS
from mutants.mutation import Mutation, NotApplicable
from mutants.run import DIED, LIMIT_S, SLOW, SURVIVED, Copy, Outcome

SOURCE = '''
class Door:
    def open(self, wide=True):
        """Open it: x = 1."""
        x = 1  # the first
        self.log(
            x,
        )

    def shut(self):
        x = 1
        return x == 1
'''


def mutation(where: str, text: str, becomes: str) -> Mutation:
    return Mutation("door.py", where, text, becomes, "nothing", ())


@pytest.mark.parametrize(
    ("where", "text", "becomes", "reads"),
    [
        ("Door.open", "x = 1", "x = 2", "x = 2  # the first"),
        ("Door.shut", "x = 1", "x = 2", "x = 2\n        return"),
        ("Door.open", "self.log(x,)", "self.log(0)", "self.log(0)\n\n"),  # whatever the layout
        ("Door.open", "x = 1\n        self.log(", "self.log(", '1."""\n        self.log(\n'),  # over a comment
        ("Door.open", "wide=True", "wide=False", "wide=False"),
        ("Door.open", "        self.log(x,)\n", "", "# the first\n        \n"),  # a statement that is gone
        ("Door.shut", " == 1", "", "return x \n"),
        ("", "class Door", "class Gate", "class Gate"),
    ],
)
def test_words_are_found_in_their_function(where: str, text: str, becomes: str, reads: str) -> None:
    made = mutation(where, text, becomes).applied(SOURCE)
    assert reads in made
    assert ast.dump(ast.parse(made)) != ast.dump(ast.parse(SOURCE))


@pytest.mark.parametrize(
    ("where", "text", "becomes", "why"),
    [
        ("Door", "x = 1", "x = 2", "found 2 times"),
        ("Door.open", "y = 1", "x = 2", "found 0 times"),
        ("Door.open", "", "x = 2", "found 0 times"),
        ("Door.knock", "x = 1", "x = 2", r"no Door\.knock"),
        ("Door.open", "x = 1", "x = (1)", "the same program"),
        ("Door.open", "x = 1", "x = (1", "or none"),
    ],
)
def test_what_cannot_become_a_mistake_is_refused(where: str, text: str, becomes: str, why: str) -> None:
    with pytest.raises(NotApplicable, match=why):
        mutation(where, text, becomes).applied(SOURCE)


def test_there_are_as_many_as_were_asked_for_and_no_two_are_the_same() -> None:
    assert len(MUTATIONS) >= 60
    assert len({(m.file, m.where, m.text, m.becomes) for m in MUTATIONS}) == len(MUTATIONS)
    assert len({(m.file, m.breaks) for m in MUTATIONS}) == len(MUTATIONS)


def test_a_test_file_is_found_wherever_it_lies() -> None:
    here = Mutation("a.py", "", "x", "y", "", ("test_mutants.py::test_a_test_file_is_found_wherever_it_lies",))
    assert [path.rpartition("/")[2] for path in here.paths()] == list(here.tests)
    with pytest.raises(NotApplicable, match="found 0 times"):
        Mutation("a.py", "", "x", "y", "", ("test_nowhere.py",)).paths()


class OnASlowMachine(Copy):
    """Tests that take so long with the mistake, and so long without."""

    def __init__(self, folder, *outcomes: Outcome) -> None:
        self._folder, self._made, self._outcomes = folder, 0, list(outcomes)
        (folder / "door.py").write_text(SOURCE)

    def test(self, tests, first_only=True) -> Outcome:
        return self._outcomes.pop(0)


@pytest.mark.parametrize(
    ("seconds", "verdict", "told"),
    [(5.0, DIED, DIED), (5.0, SURVIVED, DIED), (100.0, SURVIVED, SLOW), (LIMIT_S, SLOW, SLOW)],
)
def test_no_end_is_a_mistakes_doing_only_where_the_same_tests_end_soon_without_it(tmp_path, seconds, verdict, told):
    late = Outcome(SLOW, LIMIT_S, "no end")
    outcomes = [Outcome(DIED, seconds, "a test")] if verdict == DIED else [late, Outcome(verdict, seconds, "")]
    found = OnASlowMachine(tmp_path, *outcomes).mutate(mutation("Door.open", "x = 1", "x = 2"))
    assert found.verdict == told
    assert (tmp_path / "door.py").read_text() == SOURCE
