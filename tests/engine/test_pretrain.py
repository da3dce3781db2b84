"""``spec-plugin train`` as a user runs it: killed while it samples, resumed, measured by the engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from spec_plugin_conformance.tiny import byte_tokenizer, make_target

pytestmark = pytest.mark.engine


def command(tmp_path: Path, python: str) -> list[str]:
    inputs = [
        "--target",
        str(tmp_path / "target"),
        "--prompts",
        str(tmp_path / "p.json"),
        "--out",
        str(tmp_path / "draft"),
    ]
    amounts = ["--responses", "192", "--tokens", "24", "--steps", "96", "--k", "4", "--train-tokens", "256"]
    return [python, "-m", "spec_plugin.commands.cli", "train", *inputs, *amounts]


def test_a_draft_is_trained_before_a_run_and_goes_on_after_a_kill(tmp_path, warm_python):
    target = make_target(tmp_path / "target")
    byte_tokenizer(320, ("<|im_end|>", "<|pad|>")).save_pretrained(target)
    (tmp_path / "p.json").write_text(json.dumps([chr(97 + i) * 3 for i in range(26)]))
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    first = subprocess.Popen(command(tmp_path, sys.executable), env=environment, start_new_session=True)
    sampled = tmp_path / "draft.work" / "rollouts.jsonl"
    limit = time.monotonic() + 180
    while not (sampled.exists() and sampled.read_bytes().count(b"\n") >= 64) and time.monotonic() < limit:
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    before = sampled.read_bytes()
    kept = before[: before.rfind(b"\n") + 1]
    assert kept.count(b"\n") >= 64 and not (tmp_path / "draft").exists()

    done = subprocess.run(command(tmp_path, warm_python), env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens a step, measured" in done.stdout and "spec.draft=" in done.stdout
    about = json.loads((tmp_path / "draft" / "training.json").read_text())
    assert about["rollouts"] == 192 and not (tmp_path / "draft.work").exists()
    measured, predicted = about["measured_chances"], about["predicted_chances"]
    # the prediction leaves rounds out that reach beyond a response's end; this policy's short ones end by chance, which no draft
    # foresees and the engine counts (0.70 to 0.74 against 0.83 to 0.89 with four seeds)
    assert measured[0] > 0.5 and -0.1 < predicted[0] - measured[0] < 0.3
    assert all(abs(seen - said) < 0.2 for seen, said in zip(measured[1:], predicted[1:], strict=True))
