"""The projection against numbers that were measured: rows that it was not fitted to, and how far off they are."""

from __future__ import annotations

import json

import pytest
from builders.paths import ROOT

from examples.bench.projection import FITTED, GOALS, Held, all_rows

RESULTS = ROOT / "examples" / "bench" / "results" / "projection.json"
#: predicted rows that miss the goal, and by how much more; each has its reason in the benchmark's notes
MISSES = {
    "RL-Zero, k=7, 5.06 tokens a step": 0.25,
    "RL-Think, k=5, 3.23 tokens a step": 0.45,
    "RL-Think, k=7, 3.48 tokens a step": 0.50,
}


@pytest.fixture(scope="module")
def rows() -> list[Held]:
    return all_rows()


def test_predicted_rows_meet_the_goal_of_their_part_but_for_named_ones(rows: list[Held]) -> None:
    for row in rows:
        if row.how == "predicted" and row.error is not None and row.part != "CPU":
            assert abs(row.error) <= MISSES.get(row.name, GOALS[row.part]), (row.name, row.error)


def test_fitted_rows_are_the_declared_ones_and_are_not_counted_as_predicted(rows: list[Held]) -> None:
    fitted = {row.name for row in rows if row.how == "fitted" and row.part == "8B"}
    assert fitted == {"RL-Zero, k=3, 3.32 tokens a step", "RL-Zero, k=5, 4.35 tokens a step"}
    assert len(fitted) == len(FITTED)
    predicted = {row.name for row in rows if row.how == "predicted"}
    assert not fitted & predicted


def test_the_numbers_in_the_repository_are_those_that_the_code_gives(rows: list[Held]) -> None:
    stored = {(r["part"], r["name"], r["how"]): r["predicted"] for r in json.loads(RESULTS.read_text())["results"]}
    assert stored.keys() == {(row.part, row.name, row.how) for row in rows}
    for row in rows:
        assert row.predicted == pytest.approx(stored[row.part, row.name, row.how], rel=0.02), row.name


def test_our_own_rollouts_are_predicted_from_the_calibration_alone(rows: list[Held]) -> None:
    """Measured beside other work; what is beyond the answers has an acceptance that no start-up has seen."""
    mine = [row for row in rows if row.part == "CPU" and row.how == "predicted"]
    beyond = ("beyond them, k=3", "beyond them, k=8")
    errors = {row.name: abs(row.error or 0.0) for row in mine if not any(name in row.name for name in beyond)}
    assert len(mine) == 25 and len(errors) == 21
    assert [name for name, error in errors.items() if error > GOALS["CPU"]] == ["batch 8, k=3 against k=0"]
    assert max(errors.values()) < 0.17 and sorted(errors.values())[10] < 0.05


def test_where_the_acceptance_was_another_one_that_is_most_of_the_error(rows: list[Held]) -> None:
    held = {row.name: row for row in rows if row.part == "CPU"}
    own = [row for row in held.values() if row.how == "for comparison"]
    assert len(own) == 2
    for row in own:
        predicted = held[row.name.removesuffix(", with the acceptance of these rollouts")]
        assert predicted.how == "predicted" and abs(row.error or 0.0) < 0.4 * abs(predicted.error or 0.0)
