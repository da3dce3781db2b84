"""The short form of ``make soak``: a real engine, random faults everywhere, one kill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.engine


def test_law_6_random_faults_and_a_kill_let_no_wrong_log_prob_in_leave_nothing_behind_and_stop_nothing(tmp_path):
    path = os.pathsep.join(
        [str(ROOT / "tests"), str(ROOT / "examples" / "minimal_adapter"), os.environ.get("PYTHONPATH", "")]
    )
    done = subprocess.run(
        [sys.executable, "-m", "soak.run", "--steps", "16", "--kills", "1", "--seed", "7", "--out", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
