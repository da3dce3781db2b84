"""The conformance kit on real engines: it passes the minimal adapter, and catches each wrong one by the check that is meant."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRONG = sorted(file.stem for file in (ROOT / "tests" / "wrong_adapters").glob("[a-z]*.py"))
PATH = [str(ROOT / "examples" / "minimal_adapter"), str(ROOT / "tests")]
SECONDS = 1800

pytestmark = pytest.mark.engine


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
    assert "26 passed" in done.stdout


def test_one_whose_rollouts_lag_behind_keeps_it(warm_python):
    done = kit(warm_python, "minimal_adapter.driver:LaggingDriver")
    assert done.returncode == 0, done.stdout[-8000:]
    assert "26 passed" in done.stdout


def test_two_engines_hold_the_same_draft_and_are_counted_together(warm_python):
    done = kit(warm_python, "minimal_adapter.driver:PairDriver", "-k", "installed or target_ or weights or engine")
    assert done.returncode == 0, done.stdout[-8000:]
    assert "7 passed" in done.stdout, done.stdout[-8000:]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_adapter_is_caught_by_the_check_that_is_meant(name, warm_python):
    (check,) = re.findall(r'^CAUGHT_BY = "(\w+)"', (ROOT / "tests" / "wrong_adapters" / f"{name}.py").read_text(), re.M)
    done = kit(warm_python, f"wrong_adapters.{name}:Driver", "-k", check)
    assert done.returncode == 1, done.stdout[-8000:]
    assert "1 failed" in done.stdout and " passed" not in done.stdout, done.stdout[-8000:]
    # one that cannot even run fails every check, and shows nothing; one that the guard stops is caught
    stopped = re.search(r"the run '\w+'\s+stopped early", done.stdout)
    assert not stopped or "LogprobProvenanceError" in done.stdout, done.stdout[-8000:]
