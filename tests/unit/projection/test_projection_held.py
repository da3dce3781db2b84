"""The projection against numbers that were measured: rows that it was not fitted to, and how far off they are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import pytest
from builders.paths import ROOT
from spec_plugin_projection.constants import MEASURED_ON
from spec_plugin_projection.hardware import find_card
from spec_plugin_projection.lengths import from_responses
from spec_plugin_projection.projecting import Question, project
from spec_plugin_projection.roofline import Deployment
from spec_plugin_projection.shapes import find_model

from examples.bench.projection import FITTED, GOALS, Held, all_rows
from examples.bench.projection_record import WHY, Row, markdown, rows_of

RESULTS = ROOT / "examples" / "bench" / "results" / "projection.json"
#: predicted rows that miss the goal, and by how much more; each has its reason in the benchmark's notes
MISSES = {
    "RL-Zero, k=7, 5.06 tokens a step": 0.25,
    "RL-Think, k=5, 3.23 tokens a step": 0.47,
    "RL-Think, k=7, 3.48 tokens a step": 0.50,
}
#: of the H100's speed-ups the one whose rounds took half as long again as their steps say: version, batch, k
STALLED = ("0.26.0", 8, 3)
CARD = sorted(RESULTS.parent.glob("card-h100*.json"))


@pytest.fixture(scope="module")
def rows() -> list[Held]:
    return all_rows()


@pytest.fixture(scope="module")
def record() -> list[Row]:
    return rows_of()


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


def test_every_row_that_a_card_measured_is_near_or_says_why_it_is_not(record: list[Row]) -> None:
    """Off by more than a quarter are those that are named, and no name is left of a row that has come near."""
    assert {f"{row.what}, {row.setting}" for row in record if row.far} == set(WHY)
    of = {how: [row for row in record if row.how == how] for how in ("predicted", "fitted", "not predicted")}
    assert all(row.note for row in of["not predicted"])
    # the rows by which constants were chosen lie in the range, all of them, and most of the others
    assert all(row.inside for row in of["fitted"])
    assert sum(row.inside for row in of["predicted"]) > 0.75 * len(of["predicted"])


def test_the_record_has_every_number_of_the_results_and_all_are_of_the_one_card(record: list[Row]) -> None:
    parts = [part for file in CARD for part in json.loads(file.read_text())["parts"]]
    assert {part["environment"]["card"] for part in parts} == {"NVIDIA H100 80GB HBM3"} and MEASURED_ON == "H100"
    kinds = Counter(row["kind"] for part in parts for row in part["rows"])
    numbers = {"step": 2, "calibration": 1, "rollouts": 6, "engine": 2, "training": 3, "smoke": 0, "engine lost": 0}
    assert len(record) == sum(numbers[kind] * count for kind, count in kinds.items()) > 100


def test_the_page_has_the_table_that_the_command_prints(record: list[Row]) -> None:
    page = (ROOT / "docs" / "reference" / "projection-record.md").read_text()
    assert page.partition("<!-- record:begin -->\n")[2].partition("<!-- record:end -->")[0] == markdown(record)


def card_rows(version: str) -> Iterator[tuple[int, int, float, float]]:
    """Batch, k, tokens a step and speed against an engine without the flag, as an H100 showed them with an 8B's shape."""
    file = {"0.24.0": "card-h100.json", "0.26.0": "card-h100-vllm0.26.json"}[version]
    parts = json.loads((RESULTS.parent / file).read_text())["parts"]
    rows = [row for part in parts for row in part["rows"]]
    steps = [row for row in rows if row["kind"] == "step"]
    plain = {row["batch"]: row["tokens_per_second"]["median"] for row in steps if row["arm"] == "off"}
    for row in steps:
        if k := int(row["arm"].rpartition("k=")[2] or 0) if "k=" in row["arm"] else 0:
            yield row["batch"], k, row["tokens_per_step"], row["tokens_per_second"]["median"] / plain[row["batch"]]
    for row in (row for row in rows if row["kind"] == "rollouts"):
        batch = 16 if row["regime"].startswith("batch 16") else 1
        speed = row["rates"][f"k={row['k']}"]["median"] / row["rates"]["live"]["median"]
        yield batch, row["k"], row["acceptance"][f"k={row['k']}"], speed


@pytest.mark.parametrize("version", ["0.24.0", "0.26.0"])
def test_what_an_h100_measured_lies_in_the_range_and_its_median_is_near(version: str) -> None:
    """Among them 0.82x, a mediocre draft at batch 16, of which projections once said 1.18x."""
    rows = list(card_rows(version))
    assert len(rows) == {"0.24.0": 4, "0.26.0": 12}[version]
    deployment = Deployment(find_model("Qwen3-8B").with_whole_head(), find_card("H100"))
    for batch, k, tokens, measured in rows:
        lengths = from_responses([48] * batch, "as measured")
        full = version == "0.26.0" and k == 7 and batch < 128  # as that engine had captured them
        asked = Question(deployment, 1, batch, lengths, {k: tokens}, (k,), prompt=16, group=1, full_graphs=full)
        found = next(row for row in project(asked).rows if row.k == k).rollout_speedup
        assert found.low <= measured <= found.high, (batch, k, measured, found)
        near = 0.35 if (version, batch, k) == STALLED else 0.22
        assert found.typical == pytest.approx(measured, rel=near), (batch, k, measured, found)


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
