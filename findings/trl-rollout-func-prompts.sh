#!/bin/bash
# trl 1.16.0, GRPOTrainer's `rollout_func`, whose docstring says: it "receives the raw per-process prompt slice with no duplication;
# it is responsible for returning the correct number of completions per prompt (see `num_generations` …)".
#
# A good guess: of two prompts with num_generations=4 it is given two, and returns eight completions, four for each in turn.
# Seen: it is given eight, each prompt four times, and one completion for each is right. A function that does what the docstring
#   says returns 32, and the step stops with a ValueError about the *reward* function, which "returned 32 rewards, but 8 were
#   expected", though it was asked for 32.
# Exit code 0: as seen. 1: something of it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
# torch's CPU build, where pip is not configured to find it: give pip PyTorch's own index of these (PIP_EXTRA_INDEX_URL)
"$folder/env/bin/pip" install -q trl==1.16.0 torch==2.13.0+cpu transformers==5.15.0 datasets==5.0.0
cat > "$folder/train.py" <<'PY'
import sys
from importlib.metadata import version

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

as_documented = sys.argv[1] == "documented"
core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<end>", "<pad>", *"abcdefgh"])}, unk_token="<pad>"))
core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", pad_token="<pad>")
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
policy = Qwen3ForCausalLM(Qwen3Config(vocab_size=10, pad_token_id=1, eos_token_id=0, **sizes))
prompts_given, rewards_asked = [], []


def rollouts(prompts, trainer):
    prompts_given.append((len(prompts), len(set(prompts))))
    each = trainer.num_generations if as_documented else 1
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts for _ in range(each)]
    return {"prompt_ids": ids, "completion_ids": [[5, 0] for _ in ids], "logprobs": [[-1.0, -1.0] for _ in ids]}


def reward(completions, **_):
    rewards_asked.append(len(completions))
    return [float(i) for i in range(len(completions))]


config = GRPOConfig(
    output_dir=sys.argv[2], use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", save_strategy="no",
    per_device_train_batch_size=8, num_generations=4, max_completion_length=4, max_steps=1,
)
data = Dataset.from_list([{"prompt": f"{a} {b}"} for a, b in zip("abcdefgh", "bcdefgha")])
trainer = GRPOTrainer(policy, reward, config, train_dataset=data, processing_class=tokenizer, rollout_func=rollouts)
try:
    trainer.train()
    end = "trained"
except ValueError as error:
    end = f"ValueError: {error}".split(". ")[0]
print("trl", version("trl"), *sys.argv[1:2], "given", *prompts_given[0], "asked", *rewards_asked, end, flush=True)
PY
cd "$folder"
export TRL_EXPERIMENTAL_SILENCE=1
{ env/bin/python train.py one "$folder/a"; env/bin/python train.py documented "$folder/b"; } 2> "$folder/err" | grep "^trl 1" | tee seen || { tail -20 "$folder/err"; exit 1; }
cat > expected <<'TXT'
trl 1.16.0 one given 8 2 asked 8 trained
trl 1.16.0 documented given 8 2 asked 32 ValueError: The reward function 'reward' returned 32 rewards, but 8 were expected (one per prompt-completion pair)
TXT
diff expected seen
