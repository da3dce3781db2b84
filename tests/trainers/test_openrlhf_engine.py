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
from spec_plugin_conformance import tiny
from spec_plugin_conformance.launch import ENVIRONMENT

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


def test_the_self_test_runs_while_the_trainer_has_the_engine_asleep(found: dict[str, Any]) -> None:
    assert found["self-test asleep"]["passed"], found["self-test asleep"]


def test_the_self_test_runs_while_the_trainer_has_the_engine_paused_with_requests_in_flight(
    found: dict[str, Any],
) -> None:
    partial = found["partial"]
    assert partial["self-test"]["passed"], partial["self-test"]
    assert partial["paused"], "and the trainer finds it as it left it"
    assert len(partial["in flight at the sync"]) == 4, "none of them went on beside the test"


def test_requests_in_flight_go_on_where_they_stood_and_say_the_same(found: dict[str, Any]) -> None:
    """With the same weights on both sides of the sync, and drafts that come anew."""
    assert found["partial"]["same"]


def test_what_was_sampled_before_and_after_a_sync_is_told_apart(found: dict[str, Any]) -> None:
    partial, spans = found["partial"], found["partial"]["spans"]
    old, new = ([(first, until) for v, first, until in spans if v == version] for version in (7, 8))
    assert sorted(until - 3 for _, until in old) == partial["in flight at the sync"]
    assert sorted([*old, (3, 3)]) == sorted((3, first) for first, _ in new), "and what came meanwhile is all new"
    assert all(until == 3 + 96 for _, until in new)
    assert partial["tokens"] == sum(partial["in flight at the sync"]) and partial["drafts"] > 0
    assert partial["after"] == 5 * 96 - partial["tokens"]
