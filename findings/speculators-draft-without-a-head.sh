#!/bin/bash
# speculators 0.9.0, an EAGLE-3 draft that uses its target's whole vocabulary and whose file holds neither embedding nor LM head, as vLLM
# serves such drafts (both are the target's). config.json names the target, in which both are.
#
# A good guess: `SpeculatorModel.from_pretrained` takes both from the target, as it does with the embedding, or refuses the file.
# Seen: the embedding is the target's; the LM head is random numbers, other ones at each load, and no exception says so. What it
#   drafts is then as good as chance, which verification hides: samples stay right, and nothing is accepted.
# Exit code 0: as seen. 1: something of it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q speculators==0.9.0
cat > "$folder/ask.py" <<'PY'
import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from transformers import LlamaConfig, LlamaForCausalLM

folder = Path(sys.argv[1])
shape = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
}
torch.manual_seed(0)
target = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False))
target.save_pretrained(folder / "target")
hidden, width = shape["hidden_size"], 2 * shape["hidden_size"]
tensors = {"fc.weight": torch.randn(hidden, 3 * hidden), "norm.weight": torch.ones(hidden)}
layer = "layers.0."
for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
    tensors[f"{layer}{name}.weight"] = torch.ones(hidden)
for name in "qkv":
    tensors[f"{layer}self_attn.{name}_proj.weight"] = torch.randn(hidden, width)
tensors[f"{layer}self_attn.o_proj.weight"] = torch.randn(hidden, hidden)
for name in ("gate", "up"):
    tensors[f"{layer}mlp.{name}_proj.weight"] = torch.randn(shape["intermediate_size"], hidden)
tensors[f"{layer}mlp.down_proj.weight"] = torch.randn(hidden, shape["intermediate_size"])
draft = folder / "draft"
draft.mkdir()
save_file(tensors, draft / "model.safetensors")
config = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": str(folder / "target"), "architectures": ["LlamaForCausalLM"]},
    },
    "transformer_layer_config": {**shape, "num_hidden_layers": 1, "model_type": "llama"},
    "draft_vocab_size": shape["vocab_size"],
    "target_hidden_size": hidden,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "tie_word_embeddings": False,
}
(draft / "config.json").write_text(json.dumps(config))
heads = []
for seed in (1, 2):
    torch.manual_seed(seed)
    model = SpeculatorModel.from_pretrained(str(draft))
    parts = dict(model.named_parameters())
    embedding = next(p for n, p in parts.items() if n.endswith("embed_tokens.weight"))
    heads.append(next(p for n, p in parts.items() if n.endswith("lm_head.weight") and "verifier" not in n).detach().clone())
    same = torch.equal(embedding, target.get_input_embeddings().weight)
    print(f"{version('speculators')} embedding is the target's: {same}")
    print(f"{version('speculators')} LM head is the target's: {torch.equal(heads[-1], target.lm_head.weight)}")
print(f"{version('speculators')} LM head is the same at both loads: {torch.equal(*heads)}")
PY
"$folder/env/bin/python" "$folder/ask.py" "$folder" 2> "$folder/log" | tee "$folder/said" || { tail -n 20 "$folder/log"; exit 1; }
grep -qx "0.9.0 embedding is the target's: True" "$folder/said"
grep -qx "0.9.0 LM head is the target's: False" "$folder/said"
grep -qx "0.9.0 LM head is the same at both loads: False" "$folder/said"
