"""Steps of GRPO in TRL with the flag, on one card: engine, actor, the draft's training and its refresh in one process."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from on_card import DTYPE_NAME, HERE
from spec_plugin_conformance import tiny
from spec_plugin_conformance.launch import free_port

pytestmark = pytest.mark.gpu
STEPS = 2


@pytest.mark.parametrize("sleeps", [False, True], ids=["awake", "sleeping"])
def test_steps_of_grpo_speculate_train_their_draft_and_keep_every_guard(tmp_path: Path, target: Path, sleeps: bool):
    pytest.importorskip("trl", reason="TRL is not installed beside this vLLM")
    from spec_plugin_trl_cpu import SWITCH
    from spec_plugin_trl_cpu.run import SCRIPT

    tiny.byte_tokenizer(tiny.VOCAB, (tiny.END, tiny.PAD)).save_pretrained(target)
    data, reward = tmp_path / "data.jsonl", tiny.write_reward(tmp_path)
    data.write_text("".join(json.dumps({"prompt": p, "label": ""}) + "\n" for p in tiny.prompts(16)))
    fields: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "num_generations": 8,
        "max_completion_length": 32,
        "vllm_max_model_length": 256,
        "vllm_gpu_memory_utilization": 0.2,
        "vllm_enable_sleep_mode": sleeps,
        "learning_rate": 1e-4,
        "use_cpu": not HERE,
        "bf16": DTYPE_NAME == "bfloat16",
    }
    # one of the two with the self-test, which takes most of such a run's time
    tested = ["--spec.self_test=false"] if sleeps else ["--spec.self_test_seconds", "20" if HERE else "40"]
    words = ["--spec.k", "3", "--spec.serve", "always", "--spec.train_share=0.4", *tested, str(SCRIPT)]
    words += ["--model", str(target), "--data", str(data), "--reward", str(reward), "--out", str(tmp_path / "out")]
    words += ["--steps", str(STEPS), "--set", *(f"{name}={json.dumps(value)}" for name, value in fields.items())]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "MASTER_PORT": str(free_port())}
    if not HERE:
        environment |= {SWITCH: "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "spec_plugin_trl", *words], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    shown = {name: [row.get(name) for row in rows] for name in sorted(rows[0]) if name.startswith("spec/")}
    print("", *(f"{name}: {values}" for name, values in shown.items()), sep="\n  ")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["spec/failed"] == 0 and math.isfinite(row["loss"]) for row in rows), done.stderr[-4000:]
    assert rows[-1]["spec/draft_version"] > 0 and rows[-1]["spec/policy_version"] == STEPS - 1
    assert sleeps or "the self-test passed" in done.stderr + done.stdout
    assert "no effect" not in done.stderr
