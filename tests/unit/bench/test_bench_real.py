"""The example with a real small language model: its task, and what its sums make of steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.bench.turns import Step
from examples.quickstart import report
from examples.quickstart.side_by_side import row as row_of
from examples.quickstart.side_by_side import sums, tell
from examples.quickstart.trainers import TRAINERS
from examples.real.reward import compute_score
from examples.real.task import questions, written


def test_a_story_earns_the_share_of_its_words_that_it_uses() -> None:
    truth = "fox lamp river"
    assert compute_score("", "A Fox sat by the river.", truth) == pytest.approx(2 / 3)
    assert compute_score("", "Foxes and lamps, rivers even", truth) == 0.0
    assert compute_score("", "fox. (lamp) river!", truth) == 1.0


def test_the_task_is_the_same_each_time_and_names_its_words_in_the_question(tmp_path: Path) -> None:
    train, val = questions(40, "train"), questions(40, "val")
    assert train == questions(40, "train")
    prompts = {row["prompt"][0]["content"] for row in train}
    assert len(prompts) == 40 and not prompts & {row["prompt"][0]["content"] for row in val}
    for row in train:
        words = row["reward_model"]["ground_truth"].split()
        assert len(set(words)) == 3 and all(word in row["prompt"][0]["content"] for word in words)
    lines = [json.loads(line) for line in (written(8, tmp_path) / "train.jsonl").read_text().splitlines()]
    assert [(line["prompt"], line["label"]) for line in lines] == [
        (row["prompt"], row["reward_model"]["ground_truth"]) for row in questions(8, "train")
    ]


def row(step: int, generation: float, whole: float, tokens: float = 100.0, on: float = 0.0, woken: bool = False) -> Any:
    names = (
        "step",
        "generation_s",
        "step_s",
        "response_tokens",
        "speculating",
        "acceptance_length",
        "woken",
        "ended_s",
    )
    return dict(zip(names, (step, generation, whole, tokens, on, 1.0 + on, woken, whole + 30.0), strict=True))


def test_sums_are_of_all_steps_but_the_first_and_medians_of_those_that_drafted_to_the_end() -> None:
    plain = [row(1, 8, 20), *(row(i, 8, 10) for i in (2, 3, 4, 5))]
    flag = [
        row(1, 8, 40),
        row(2, 4, 6, on=1),
        row(3, 8, 10),
        row(4, 4, 5, 50, on=1, woken=True),
        row(5, 4, 5, on=1),
    ]
    found = sums({"plain": plain, "flag": flag})
    assert (found.first, found.drafted_from) == ({"plain": 20, "flag": 40}, 4)
    assert found.others == {"plain": 40, "flag": 26} and found.whole == {"plain": 90, "flag": 96}
    assert found.ratio == pytest.approx(40 / 400 / (26 / 350))
    assert (found.generation, found.step, found.acceptance_length) == (2.0, 2.0, 2.0), "the woken step is left out"


def test_a_run_that_never_drafts_to_the_end_has_no_ratio_of_drafted_steps() -> None:
    plain = [row(i, 8, 10) for i in (1, 2)]
    found = sums({"plain": plain, "flag": [row(1, 8, 10, on=1), row(2, 8, 10)]})
    assert (found.drafted_from, found.step, found.generation, found.acceptance_length) == (None, None, None, None)
    assert found.ratio == pytest.approx(1.0)
    said: list[str] = []
    tell({"plain": plain, "flag": [row(1, 8, 10, on=1), row(2, 8, 10)]}, found, said.append)
    assert "whole run with the flag 50.0 s, without 50.0 s: 1.00x" in said[-2] and "No step" in said[-1]


def test_a_row_has_no_time_for_which_its_run_was_stopped() -> None:
    metrics = {"generation_s": 300.0, "step_wall_s": 310.0, "completions/mean_length": 50.0}
    found = row_of(Step(2, metrics, 25.0, 285.0), TRAINERS["trl"])
    assert (found["generation_s"], found["step_s"], found["woken"]) == (15.0, 25.0, True)


def test_a_bar_shows_where_the_seconds_of_a_run_went() -> None:
    records = [
        {"step_s": 20.0, "generation_s": 8.0, "cost_s": 6.0},
        {"step_s": 10.0, "generation_s": 4.0, "cost_s": None},
    ]
    found = report.parts(records, 60.0)
    assert [*found.values()] == [30.0, 12.0, 12.0, 6.0]
    drawn, words = report.bar("plain", found, 120.0).splitlines()
    assert drawn.strip() == "plain " + "·" * 15 + "█" * 6 + "▒" * 6 + "░" * 3 + " 60 s"
    assert "draft work and self-tests 6 s" in words
