"""An engine that serves a LoRA adapter, and drafts: what it says is the adapted target's, and the repair that it takes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import small
import torch

from draft_training.eagle3 import save_draft

pytestmark = pytest.mark.engine

SCRIPT = """
import json, sys
from pathlib import Path
import small
from spec_plugin.engine.vllm import extension
from spec_plugin.engine.vllm.schedule.counters import read_spec_counters
target, draft, adapter, repaired = sys.argv[1:]
if repaired == "no":
    extension.ADAPTER_PATCHES = ()
llm = small.start_engine(Path(target), Path(draft), enable_lora=True, max_loras=1, max_lora_rank=8)
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
params = SamplingParams(temperature=0.0, max_tokens=small.TOKENS, ignore_eos=True, detokenize=False)
prompts = [{"prompt_token_ids": p} for p in small.PROMPTS]
before = small.rpc(llm, "spec_audit")
made = llm.generate(prompts, params, use_tqdm=False, lora_request=LoRARequest("a", 1, adapter))
after = small.rpc(llm, "spec_audit")
counters = read_spec_counters()
print("RESULT " + json.dumps({
    "tokens": [list(o.outputs[0].token_ids) for o in made],
    "accepted": counters["accepted_tokens"] / counters["drafts"],
    "patches": {p["name"]: p["state"] for p in small.rpc(llm, "spec_draft_info")["patches"]},
    "told apart": before["target"] != after["target"],
    "same base": [before[n] == after[n] and before[n] != "" for n in ("embed", "head")],
}))
"""


@pytest.fixture(scope="module")
def adapted(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """An adapter that changes what the target says, and what it says then, according to transformers and PEFT."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(1.2)
    model.save_pretrained(folder)
    return folder, small.reference(target, model.eval())


def run(python: str, *words: object) -> tuple[dict[str, Any] | None, str]:
    """What the script has found, and what it wrote."""
    here = Path(__file__).parent
    done = subprocess.run(
        [python, "-c", SCRIPT, *map(str, words)],
        cwd=here,
        env={**os.environ, "PYTHONPATH": f"{here.parents[1]}:{here}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return (json.loads(lines[0].removeprefix("RESULT ")) if lines else None), done.stdout + done.stderr


@pytest.fixture(scope="module")
def good_draft(config: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts") / "good"
    save_draft(folder, config, small.good_tensors(config))
    return folder


def test_it_says_what_the_adapted_target_says_and_drafts(adapted, target, good_draft, greedy_reference, warm_python):
    adapter, reference = adapted
    found, said = run(warm_python, target, good_draft, adapter, "yes")
    assert found is not None, said[-3000:]
    assert reference != greedy_reference and found["tokens"] == reference
    assert found["accepted"] > 0.2 and found["patches"]["bare_embedding"] == "in force"
    assert found["told apart"] and all(found["same base"])


@pytest.mark.v1("the repair is of V1")
def test_the_repair_is_still_needed(adapted, target, good_draft, warm_python):
    """When this fails because the engine lives, vLLM's first runner has learnt it, and the patch can go."""
    found, said = run(warm_python, target, good_draft, adapted[0], "no")
    assert found is None and "Error" in said
