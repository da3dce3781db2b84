"""A small target, drafts for it and an engine to serve them, made in seconds without a network."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import runner  # before vLLM
import torch
from inspected import EXTENSION
from safetensors.torch import save_file
from spec_plugin_conformance import tiny

from draft_training import digest
from draft_training.config import DraftConfig
from draft_training.model import Eagle3Draft

VOCAB = tiny.VOCAB
PROMPTS = [[(7 * i + j * j) % VOCAB for j in range(6 + i)] for i in range(6)]
TOKENS = 24
KV_BLOCKS = 64  # of 128 tokens


def make_target(folder: Path, family: str = "qwen3") -> Path:
    """A random policy of 8 layers that, with probability 0.85, says the current token + 37: sharp, and easy to draft for."""
    return tiny.make_target(folder, num_key_value_heads=2, family=family)


def reference(target: Path, model: Any = None) -> list[list[int]]:
    """What the target says greedily, according to transformers: no vLLM, no speculation."""
    from transformers import AutoModelForCausalLM

    model = model or AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    outputs = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            whole = torch.ones_like(ids)  # else it leaves out the tokens that are its padding's
            out = model.generate(
                input_ids=ids, attention_mask=whole, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None
            )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def draft_config(target: Path, draft_vocab_size: int | None = None) -> DraftConfig:
    hf = json.loads((target / "config.json").read_text())
    return DraftConfig.from_target(hf, draft_vocab_size=draft_vocab_size)


def expected_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of a draft's checkpoint."""
    return {name: tuple(t.shape) for name, t in sorted(Eagle3Draft(config, device="meta").state_dict().items())}


def draft_tensors(config: DraftConfig, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Random weights under the names that draft training sends: hardly any token is accepted."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = (0.05 * noise if len(shape) > 1 else 1 + 0.1 * noise).to(dtype)
    return tensors


def good_tensors(config: DraftConfig) -> dict[str, torch.Tensor]:
    """The draft that knows :func:`make_target`: attends to the current token and hands its embedding to the head.

    With one key-value head for two query heads it hands over the first half, which tells the tokens apart, too.
    """
    h, kv = config.hidden_size, config.num_kv_heads * config.head_dim
    current = torch.cat([torch.eye(h), torch.zeros(h, h)], dim=1)  # [H, 2H], reads the embedding, not the hidden state
    replace = torch.cat([torch.eye(h), -torch.eye(h)], dim=1)  # and takes the previous token's out of the residual
    tensors = {name: torch.zeros(shape) for name, shape in expected_shapes(config).items()}
    for name in tensors:
        if name.endswith("norm.weight"):
            tensors[name] = torch.ones_like(tensors[name])
    tensors["midlayer.self_attn.q_proj.weight"] = 2 * current
    tensors["midlayer.self_attn.k_proj.weight"] = 2 * current[:kv]
    tensors["midlayer.self_attn.v_proj.weight"] = replace[:kv]
    tensors["midlayer.self_attn.o_proj.weight"] = torch.eye(h)
    tensors["midlayer.self_attn.o_proj.weight"][kv:] = 0
    return tensors


def engine_options(draft: Path) -> dict[str, Any]:
    """Of every engine here, in words that JSON has too."""
    return {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 16,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "logprobs_mode": "processed_logprobs",  # raw ones hide wrong sampling
        "speculative_config": {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 3},
        "worker_extension_cls": EXTENSION,
        # twice what all sequences need; by itself an engine takes a gigabyte, and those of this process stay until its end
        "num_gpu_blocks_override": KV_BLOCKS,
    }


def start_engine(target: Path, draft: Path, **options: Any) -> Any:
    """An engine in this process, so that tests reach its worker and can step it by hand."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM

    llm = LLM(model=str(target), **{**engine_options(draft), **options})
    if llm.llm_engine.vllm_config.speculative_config is not None:
        runner.assert_serves(rpc(llm, "spec_draft_info"), llm.llm_engine.vllm_config)
    return llm


def install(llm: Any, tensors: dict[str, torch.Tensor], version: int, **options: Any) -> dict[str, Any]:
    """Replace the draft as the engine's front does; by default with the true digest and names."""
    sent = {"version": version, "digest": digest(tensors), "names": list(tensors), **options}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "draft.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        report: dict[str, Any] = rpc(llm, "spec_install_file", path=str(file), **sent)
    return report


def live_digest(llm: Any) -> str:
    """Of the draft's weights as the worker holds them now."""
    return str(rpc(llm, "spec_audit")["draft"])


def generate(llm: Any, temperature: float = 0.0, tokens: int = TOKENS, **options: Any) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, detokenize=False, **options)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    return [o.outputs[0] for o in outputs]


def generate_one(llm: Any, prompt: list[int]) -> None:
    """One token after one prompt, so that the whole prompt is one forward pass."""
    from vllm import SamplingParams

    llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)


def greedy(llm: Any) -> list[list[int]]:
    return [list(o.token_ids) for o in generate(llm)]


def rpc(llm: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    """The answer of the one worker."""
    return llm.collective_rpc(method, args=args, kwargs=kwargs)[0]
