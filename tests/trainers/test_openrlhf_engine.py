"""OpenRLHF's engine actor on a real engine: what it does while the trainer has put it to sleep, or paused it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_plugin.conformance import tiny
from spec_plugin.conformance.launch import ENVIRONMENT

pytestmark = pytest.mark.trainer
SECONDS = 600  # of the script


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    policy = tiny.make_target(tmp_path_factory.mktemp("policy"), torch.bfloat16)
    command = [sys.executable, str(Path(__file__).with_name("sleeping_engine.py")), str(policy)]
    done = subprocess.run(
        command,
        env={**ENVIRONMENT, **os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout[-3000:] + done.stderr[-5000:]
    return json.loads(lines[0].removeprefix("FOUND "))


def test_the_first_draft_arrives_in_an_engine_that_was_put_to_sleep_as_soon_as_it_was_made(
    found: dict[str, Any],
) -> None:
    assert found["installed"] and found["held"] == found["sent"] == found["held at the end"]


def test_what_is_done_to_a_sleeping_engine_leaves_it_asleep(found: dict[str, Any]) -> None:
    assert [value for name, value in found.items() if name.startswith("asleep")] == [True] * 3


@pytest.mark.parametrize("state", ["asleep", "paused"])
def test_the_self_test_runs_whatever_the_trainer_has_done_to_the_engine(found: dict[str, Any], state: str) -> None:
    assert found[f"self-test {state}"]["passed"], found[f"self-test {state}"]
    assert found["paused"], "and the trainer finds it as it left it"
