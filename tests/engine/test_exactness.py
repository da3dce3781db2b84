"""Evidence of exact sampling on real engines: one that goes wrong where no self-test looks is refused by the run's own text."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from spec_plugin_conformance import tiny

ROOT = Path(__file__).resolve().parents[2]
PATH = [str(ROOT / "examples" / "minimal_adapter"), str(Path(__file__).parent)]

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("name", "right_steps"), [("LateInTexts", 0), ("LateInTheRun", 3)])
def test_law_2_an_engine_that_goes_wrong_behind_its_self_test_is_refused_by_the_runs_own_text(
    name, right_steps, warm_python, tmp_path
):
    words = ["--target", tiny.make_target(tmp_path / "target"), "--out", tmp_path / "out", "--steps", 16, "--lr", 1e-5]
    words += ["--spec", "--adapter", f"wrong_engines:{name}", "--spec.k", 3, "--spec.serve", "always"]
    words += ["--spec.self_test", "false"] if not right_steps else []
    done = subprocess.run(
        [warm_python, "-m", "minimal_adapter", *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*PATH, os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1 and "tokens of the run's own rollouts" in done.stderr, done.stderr[-4000:]
    assert "LosslessError" in done.stderr.splitlines()[-1], done.stderr[-4000:]
    steps = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert max(right_steps, 1) <= len(steps) < 16, "the sync behind the last step has refused it"
    right = steps[:right_steps]
    assert all(step["spec/exactness"] < 2.0 for step in right) and all(s["spec/exactness_tokens"] for s in right[2:])
