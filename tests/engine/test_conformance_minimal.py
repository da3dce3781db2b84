"""The conformance kit on real engines: it passes the minimal adapter, and catches each wrong one by the check that is meant."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRONG = sorted(file.stem for file in (ROOT / "tests" / "wrong_adapters").glob("[a-z]*.py"))
PATH = [str(ROOT / "examples" / "minimal_adapter"), str(ROOT / "tests")]
SECONDS = 1800

pytestmark = pytest.mark.engine


def caught_by(name: str) -> str:
    """The check that is meant for a wrong adapter."""
    text = (ROOT / "tests" / "wrong_adapters" / f"{name}.py").read_text()
    (check,) = re.findall(r'^CAUGHT_BY = "(\w+)"', text, re.M)
    return str(check)


def kit(python: str, driver: str, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-m", "spec_plugin.commands.cli", "conformance", driver, *more],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*PATH, os.environ.get("PYTHONPATH", "")]), "COLUMNS": "160"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def test_the_minimal_adapter_keeps_the_contract(warm_python):
    done = kit(warm_python, "minimal_adapter.driver:Driver")
    assert done.returncode == 0, done.stdout[-8000:]
    assert "33 passed" in done.stdout


def test_one_whose_rollouts_lag_behind_keeps_it(warm_python):
    done = kit(warm_python, "minimal_adapter.driver:LaggingDriver")
    assert done.returncode == 0, done.stdout[-8000:]
    assert "33 passed" in done.stdout


def test_two_engines_hold_the_same_draft_and_are_counted_together(warm_python):
    done = kit(warm_python, "minimal_adapter.driver:PairDriver", "-k", "installed or target_ or weights or engine")
    assert done.returncode == 0, done.stdout[-8000:]
    assert "8 passed" in done.stdout, done.stdout[-8000:]


#: what right trainers do besides, in ``tests/right_adapters``; all at once every day, each alone for the weekly run
HABITS = ("Cooler", "DropsOut", "Validates", "Filtered", "MultiTurn")


@pytest.mark.parametrize(
    "habits", [HABITS, *(pytest.param((h,), marks=pytest.mark.family) for h in HABITS)], ids="-".join
)
def test_a_right_adapter_passes_whatever_its_trainer_does_besides(habits, warm_python):
    done = kit(warm_python, f"right_adapters:Driver_of__{'__'.join(habits)}")
    assert done.returncode == 0, done.stdout[-8000:]
    assert "33 passed" in done.stdout


#: mistakes that do not get in each other's way, so that one run shows them all
TOGETHER = (
    (
        "plain_claimed",
        "a_budget_for_each_micro_batch",
        "engine_options_not_shown",
        "head_not_copied",
        "head_pushed_into_aliased_draft",
        "metrics_a_step_late",
        "prompt_tokens_counted",
        "refresh_skipped_after_wake",
        "requests_that_never_stop",
        "a_group_torn",
    ),
    ("engines_word_recomputed", "draft_pushed_before_target", "one_matrix_rounded", "one_request_at_a_time"),
    ("compared_with_themselves", "harvest_of_a_later_pass", "gradient_not_detached", "random_numbers_consumed"),
    ("clocks_swapped", "refresh_and_audit_of_one_engine", "checked_after_the_update"),
    ("span_of_the_wrong_end", "gate_left_shut"),
)


def alone() -> list[Any]:
    """The wrong adapters; the first for each check runs every day, unless it does with others."""
    seen = {caught_by(name) for names in TOGETHER for name in names}
    found = []
    for name in WRONG:
        found.append(pytest.param(name, marks=[pytest.mark.family] if caught_by(name) in seen else []))
        seen.add(caught_by(name))
    return found


def shows(driver: str, checks: set[str], python: str) -> None:
    """The kit's checks of these names fail, each because of what it found."""
    done = kit(python, driver, "-k", " or ".join(sorted(checks)))
    failed = set(re.findall(r"FAILED \S+::(\w+)", done.stdout))
    assert done.returncode == 1 and failed == checks and " passed" not in done.stdout, done.stdout[-8000:]
    # one that cannot even run fails every check, and shows nothing; one that the guard stops is caught
    stopped = re.search(r"the run '\w+'\s+stopped early", done.stdout)
    assert not stopped or "LogprobProvenanceError" in done.stdout, done.stdout[-8000:]


@pytest.mark.parametrize("name", alone())
def test_a_wrong_adapter_is_caught_by_the_check_that_is_meant(name, warm_python):
    shows(f"wrong_adapters.{name}:Driver", {caught_by(name)}, warm_python)


@pytest.mark.parametrize("names", TOGETHER, ids=lambda names: names[0])
def test_a_wrong_adapter_of_several_mistakes_is_caught_by_the_check_that_is_meant_for_each(names, warm_python):
    shows(f"wrong_adapters._together:Driver_of__{'__'.join(names)}", {caught_by(name) for name in names}, warm_python)


@pytest.mark.family
def test_rows_that_are_padded_on_the_left_are_harvested_from_where_they_begin(warm_python):
    done = kit(warm_python, "wrong_adapters.left_padding_ignored:RightDriver", "-k", "hidden_states")
    assert done.returncode == 0, done.stdout[-8000:]
    assert "1 passed" in done.stdout, done.stdout[-8000:]


def told_apart() -> list[str]:
    """Wrong adapters whose mistake no other check sees."""
    return [n for n in WRONG if "ONLY = True" in (ROOT / "tests" / "wrong_adapters" / f"{n}.py").read_text()]


@pytest.mark.family
@pytest.mark.parametrize("name", told_apart())
def test_and_by_no_other_check(name, warm_python):
    """So each of these checks is needed. Minutes each: ``make conformance SHAPES=only``."""
    done = kit(warm_python, f"wrong_adapters.{name}:Driver")
    failed = set(re.findall(r"FAILED \S+::(\w+)", done.stdout))
    assert failed == {caught_by(name)}, done.stdout[-8000:]
