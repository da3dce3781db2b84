"""A run in which no draft was trained: what the report says of it does not contradict itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from builders.report import DATA

from spec_plugin.commands.report import make_report, to_html, to_text

#: a real run whose self-test failed: no slice of training, and two minutes of self-tests
FAILED = DATA / "trl-untrained" / "metrics.jsonl"
LINES: list[dict[str, Any]] = [json.loads(line) for line in FAILED.read_text().splitlines()]
#: what the trainer plugin logs of a slice that made no optimizer step, of an engine that goes on with one version
NO_STEP = {"spec/draft_loss": 0.0, "spec/train_steps": 0.0, "spec/expected_acceptance": 1.0, "spec/draft_version": 0.0}


@pytest.fixture
def untrained(tmp_path: Path) -> Path:
    """Eight steps: in each a slice of training that had not even time for one optimizer step."""
    rows = [{**LINES[min(s, 2)], **NO_STEP, "step": s + 1, "spec/train_ms": 40.0 + s} for s in range(8)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return tmp_path / "metrics.jsonl"


def text(file: Path) -> str:
    return "\n".join(to_text(make_report([file])))


def test_the_sum_of_costs_is_one_number_wherever_it_stands() -> None:
    said = text(FAILED)
    assert "cost 2 min 1 s of 2 min 6 s" in said
    (share,) = re.findall(r"the flag's own work took 2 min 1 s, (\S+) % of the steps' time", said)
    assert float(share) == pytest.approx(100 * 121.36 / 126.3, abs=0.5)
    assert ": self-tests (step 1) 2 min 1 s, refresh 0.2 s" in said and "together" not in said


def test_steps_without_an_optimizer_step_are_no_training(untrained: Path) -> None:
    said = text(untrained)
    assert "the draft was trained" not in said and "training predicts" not in said
    assert "no optimizer step" in said


def test_of_a_run_without_a_slice_of_training_nothing_is_said_of_training(tmp_path: Path) -> None:
    rows = [{**LINES[min(s, 2)], **NO_STEP, "step": s + 1, "spec/train_ms": 0.0} for s in range(8)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert "was trained" not in text(tmp_path) and "optimizer step" not in text(tmp_path)


def test_a_loss_that_nobody_measured_is_not_drawn(untrained: Path) -> None:
    page = to_html(make_report([untrained]))
    assert "Draft: loss" not in page and "predicted by training" not in page


def test_a_slice_that_is_logged_again_is_no_training_either(tmp_path: Path) -> None:
    """As where nobody waits for rollouts: the trainer plugin goes on logging its last slice."""
    last = {**NO_STEP, "spec/draft_loss": 1.5, "spec/train_steps": 9.0, "spec/train_ms": 40.0}
    rows = [{**LINES[min(s, 2)], **last, "step": s + 1} for s in range(8)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert "the draft was trained" not in text(tmp_path)
    assert make_report([tmp_path]).runs[0].trained == (1,)
