"""Commands of ``spec-plugin`` on a machine with a card, each in a process of its own: what they say of it and do on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from on_card import DEVICE, HERE
from spec_plugin_conformance.tiny import byte_tokenizer, make_target

pytestmark = pytest.mark.gpu


def command(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-m", "spec_plugin.commands.cli", *words],
        env=environment,
        text=True,
        capture_output=True,
        timeout=400,
    )


def test_the_doctor_knows_the_card(target: Path):
    """A bare environment may lack a trainer, of which this is no test: only what it says of device, runner and memory."""
    done = command("doctor", "--json", "--target", str(target))
    assert done.returncode in (0, 1), done.stderr
    told = json.loads(done.stdout)
    text = json.dumps(told)
    assert f"device type {DEVICE.type}" in text, text
    assert ("on the card in slices of training" in text) == HERE, text


def test_a_draft_is_trained_before_a_run_on_the_card(tmp_path: Path):
    """vLLM samples and measures, with its graphs; transformers and the draft's training have the card in between."""
    target = make_target(tmp_path / "target")
    byte_tokenizer(320, ("<|im_end|>", "<|pad|>")).save_pretrained(target)
    (tmp_path / "p.json").write_text(json.dumps([chr(97 + i) * 3 for i in range(26)]))
    words = ["--target", str(target), "--prompts", str(tmp_path / "p.json"), "--out", str(tmp_path / "draft")]
    words += ["--responses", "96", "--tokens", "24", "--steps", "64", "--k", "3", "--train-tokens", "256"]
    done = command("train", *words)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    about = json.loads((tmp_path / "draft" / "training.json").read_text())
    print(f"\nmeasured {about['measured_chances']}, predicted {about['predicted_chances']}")
    assert about["rollouts"] == 96 and about["measured_chances"][0] > 0.3
