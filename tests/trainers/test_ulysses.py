"""Harvest behind verl's Ulysses sequence parallelism: whole documents, from slices of packed rows, on two real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spec_plugin.conformance import tiny

pytestmark = pytest.mark.trainer
SECONDS, LENGTHS = 600, (9, 14, 6, 20)  # of the script


def test_each_rank_harvests_its_documents_as_a_plain_forward_would(tmp_path):
    policy = tiny.make_target(tmp_path / "policy", num_key_value_heads=2)
    script = Path(__file__).with_name("ulysses.py")
    command = [sys.executable, str(script), str(policy), str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONUNBUFFERED": "1"}, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    for rank, found in enumerate(json.loads(line.removeprefix("RESULT "))):
        assert found["lengths"] == list(LENGTHS[rank::2])
        assert found["failed"] is None
        assert max(found["aux"], found["last"]) < 1e-4 and found["logprob"] < 1e-4, found
