"""What a real engine in bfloat16 states of plain and of drafted rows is no evidence of wrong ones."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from minimal_adapter.loop import Rollouts, Settings, Trainer, padded
from spec_plugin_conformance import tiny
from torch import Tensor

from spec_plugin.policy.provenance import rules
from spec_plugin.policy.provenance.rows import RowEvidence

ROOT = Path(__file__).resolve().parents[2]
PATH = [str(ROOT / "examples" / "minimal_adapter"), str(ROOT / "tests")]
TOKENS, PLAIN, DRAFTED = 48, 5, 8
#: capital of a run that would be stopped at a level of 1e-2 a batch
ALARMING = 100

pytestmark = [pytest.mark.engine, pytest.mark.family]


def rolled_out(python: str, target: Path, out: Path, steps: int, *more: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Log-probs by the policy in float32 and by the engine in bfloat16, [B, T] each, and which tokens there are, of each step."""
    words = ["--target", target, "--out", out, "--replay", out / "rollouts", "--steps", steps, "--max-tokens", TOKENS]
    done = subprocess.run(
        [python, "-m", "minimal_adapter", *map(str, words), "--dtype", "bfloat16", "--lr", "0", *more],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*PATH, os.environ.get("PYTHONPATH", "")])},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    policy, found = Trainer(Settings(target, out, steps)), []
    for step in range(steps):
        rollouts = Rollouts(**json.loads((out / "rollouts" / f"step_{step}.json").read_text()))
        stated, mask = padded(rollouts.log_probs)
        with torch.no_grad():
            found.append((policy.policy_log_probs(rollouts).double(), stated.double(), mask))
    return found


def test_law_3_what_a_bfloat16_engine_rounds_is_no_evidence_of_wrong_rows(warm_python: str, tmp_path: Path) -> None:
    target = tiny.make_target(tmp_path / "target")
    plain = rolled_out(warm_python, target, tmp_path / "plain", PLAIN)
    options = ("--spec", "--spec.serve", "always", "--spec.self_test", "false", "--spec.train_share", "0")
    drafted = rolled_out(warm_python, target, tmp_path / "drafted", DRAFTED, *options)
    off = torch.cat([(stated - own)[mask].abs() for own, stated, mask in drafted])
    assert float(off.mean()) > 1e-4, "it is rounded to bfloat16"
    rows = RowEvidence(rules.Precision("bfloat16", 1.0))
    for batch in plain:
        rows.learn(*batch)
    capitals = []
    for batch in drafted:
        assert rows.judge(*batch) is None
        capitals.append(rows.capital)
    print(f"mean {float(off.mean()):.2g}, largest {float(off.max()):.2g} nats; capital up to {max(capitals):.2g}")
    assert 0 < max(capitals) < ALARMING
