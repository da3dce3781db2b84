"""A tiny target, a draft that agrees with it now and then, and engines that serve them: all made within the tests."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import os
import random
import tempfile
import threading
from collections.abc import Coroutine
from functools import cache, partial
from pathlib import Path
from typing import Any

import runner  # before vLLM
import small
import torch
from inspected import EXTENSION, Inspected
from safetensors.torch import load_file, save_file
from spec_plugin_conformance import tiny
from spec_plugin_conformance.tiny import HIDDEN, VOCAB, tiny_config

from draft_training.eagle3 import save_draft
from draft_training.mtp import PREFIX
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.events import TargetInfo
from spec_plugin.lifecycle.manager import built_in_method

K, MAX_NUM_SEQS = 3, 32
#: the method of an engine that names none; V2 takes no draft model
METHOD = "eagle3" if runner.V2 else "draft_model"


def _save(folder: Path, noise: float) -> str:
    """A random Qwen3 whose next-token distribution is sharp; ``noise`` blurs the head (that makes it a draft)."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(tiny_config(num_hidden_layers=2)).float()
    with torch.no_grad():
        model.lm_head.weight.normal_(std=0.45)
        model.lm_head.weight += noise * torch.randn(model.lm_head.weight.shape)
    model.save_pretrained(folder)
    return str(folder)


@cache
def models() -> tuple[str, str]:
    """Folders of (target, draft)."""
    root = Path(tempfile.mkdtemp(prefix="spec-tiny-"))
    return _save(root / "target", 0.0), _save(root / "draft", 0.15)


def _half_right() -> torch.Tensor:
    """[H, H] that nearly keeps an embedding: the counting policy's head makes the right token of it for about every second."""
    return torch.eye(HIDDEN) + 0.3 * torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(3))


def _with_own_layer(folder: Path) -> dict[str, Any]:
    """The counting policy with a layer of its own that reads the token just sampled; the method's options."""
    tiny.make_target(folder, family="qwen2", num_hidden_layers=2)
    tiny.add_mtp_layer(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{PREFIX}input_proj.weight"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), _half_right()], dim=1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return {}


def _with_eagle_1(folder: Path) -> dict[str, Any]:
    """The counting policy, and beside it an EAGLE-1 draft that reads the token just sampled; the method's options."""
    tiny.make_target(folder, num_hidden_layers=2)
    hf = json.loads((folder / "config.json").read_text())
    hf = {name: value for name, value in hf.items() if name not in ("layer_types", "max_window_layers")}
    hf |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    target = load_file(folder / "model.safetensors")
    layer = {n.removeprefix("model."): t for n, t in target.items() if n.startswith("model.layers.0.")}
    unknown = ("input_layernorm", "q_norm", "k_norm")  # to EAGLE-1
    layer = {n: t for n, t in layer.items() if not any(part in n for part in unknown)}
    draft = folder / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps(hf))
    projection = torch.cat([_half_right(), torch.zeros(HIDDEN, HIDDEN)], dim=1)
    save_file({"fc.weight": projection, **layer}, draft / "model.safetensors", {"format": "pt"})
    return {"draft": str(draft), "train": False}


def _with_eagle_3(folder: Path, good: bool = False) -> dict[str, Any]:
    """The counting policy, and beside it an EAGLE-3 draft that is right for every, or about every second token; the options."""
    small.make_target(folder)
    config = small.draft_config(folder)
    tensors = small.good_tensors(config)
    if not good:
        tensors["midlayer.self_attn.o_proj.weight"] = tensors["midlayer.self_attn.o_proj.weight"] @ _half_right()
    save_draft(folder / "draft", config, tensors)
    return {"draft": str(folder / "draft")}


_OWN_TARGETS = {
    "mtp": _with_own_layer,
    "frozen": _with_eagle_1,
    "eagle3": _with_eagle_3,
    "good eagle3": partial(_with_eagle_3, good=True),
}


@cache
def subject(method: str) -> tuple[str, dict[str, Any]]:
    """Folder of the target that a method is tested on, and the method's options."""
    if method not in _OWN_TARGETS:
        return models()[0], {}
    folder = Path(tempfile.mkdtemp(prefix="spec-tiny-")) / "target"
    options = _OWN_TARGETS[method](folder)
    return str(folder), options


def prompts(n: int = 8, length: int = 12) -> list[list[int]]:
    """Random prompts."""
    rng = random.Random(1)
    return [[rng.randrange(2, VOCAB) for _ in range(length)] for _ in range(n)]


class LossyExtension(Inspected):
    """A worker whose rejection sampler takes all drafted tokens unasked, in ``SHARE`` of the verifications."""

    SHARE = 0.25

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if runner.V2:
            _lose_the_law_on_v2(cls)
            return super().__new__(cls, *args, **kwargs)
        from vllm.v1.sample import rejection_sampler

        exact = rejection_sampler.rejection_sample

        def lossy(
            drafted: Any,
            counts: list[int],
            longest: int,
            ends: Any,
            probs: Any,
            logits: Any,
            bonus: Any,
            *rest: Any,
            **options: Any,
        ) -> Any:
            out = exact(drafted, counts, longest, ends, probs, logits, bonus, *rest, **options)
            begin = 0
            for i, n in enumerate(counts):
                if n and random.random() < cls.SHARE:
                    out[i, :n] = drafted[begin : begin + n]
                    out[i, n] = bonus[i, 0]
                begin += n
            return out

        rejection_sampler.rejection_sample = lossy
        return super().__new__(cls, *args, **kwargs)


def _lose_the_law_on_v2(extension: type[LossyExtension]) -> None:
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    exact = rejection_sampler.rejection_sample

    def lossy(logits: Any, drafted_logits: Any, drafted: Any, ends: Any, *rest: Any, **options: Any) -> Any:
        out, counts = exact(
            logits, drafted_logits, drafted, ends, *rest, **options
        )  # rows: each request's last token, its drafts
        for i, (begin, end) in enumerate(itertools.pairwise(ends.tolist())):
            n = end - begin - 1
            if n and random.random() < extension.SHARE:
                out[i, :n] = drafted[begin + 1 : end]
                out[i, n] = torch.multinomial(logits[end - 1].float().softmax(-1), 1)[0]
                counts[i] = n + 1
        return out, counts

    rejection_sampler.rejection_sample = lossy


class AlwaysLossyExtension(LossyExtension):
    """In all of them."""

    SHARE = 1.0


class SwitchedExtension(LossyExtension):
    """In none, until it is told to."""

    SHARE = 0.0

    def spec_take_unasked(self, share: float) -> None:
        """Lose the law from now on, in this share of the verifications."""
        type(self).SHARE = share


def _with_a_draft_model() -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Target, vLLM's speculative_config and our settings of the worker."""
    target, draft = models()
    settings = {
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": K,
        "num_speculative_tokens_per_batch_size": [(1, MAX_NUM_SEQS, K)],
    }
    return target, settings, {}


def _as_the_plugin(name: str, sampled: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The same, as the plugin would start an engine with this method."""
    target, spec = subject(name)
    hf = json.loads((Path(target) / "config.json").read_text())
    info = TargetInfo(target, hf, "float32", max_num_seqs=MAX_NUM_SEQS)
    method = built_in_method(
        SpecConfig.parse({"method": name.split()[-1], "k": K, "draft_sample_method": sampled, **spec}), info
    )
    assert method is not None
    return target, method.speculative_config(), method.worker_settings()


class LiveEngine:
    """An AsyncLLM on an event loop of its own, so that several test modules can share it."""

    def __init__(self, skip_patches: tuple[str, ...], extension: str, options: dict[str, Any]) -> None:
        os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.engine = self.run(self._start(skip_patches, extension, dict(options)))
        for info in self.run(self.engine.collective_rpc("spec_draft_info")):
            runner.assert_serves(info, self.engine.vllm_config)

    async def _start(self, skip_patches: tuple[str, ...], extension: str, options: dict[str, Any]) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from spec_plugin.engine.vllm.schedule.scheduler import SCHEDULER

        name, sampled = options.pop("method", METHOD), options.pop("draft_sample_method", "greedy")
        target, settings, own = _as_the_plugin(name, sampled) if name != "draft_model" else _with_a_draft_model()
        own = {"skip_patches": list(skip_patches), **own}
        arguments = AsyncEngineArgs(
            model=target,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=256,
            enforce_eager=True,
            max_num_seqs=MAX_NUM_SEQS,
            disable_log_stats=False,
            scheduler_cls=SCHEDULER,
            worker_extension_cls=extension,
            additional_config={"spec_plugin": own},
            speculative_config=settings,
            **{"logprobs_mode": "processed_logprobs", **options},
        )
        return AsyncLLM.from_engine_args(arguments)

    def run(self, work: Coroutine[Any, Any, Any], timeout: float = 300.0) -> Any:
        """Run a coroutine on the engine's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def close(self) -> None:
        """Shut the engine down."""
        self.loop.call_soon_threadsafe(self.engine.shutdown)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)


_live: dict[str, LiveEngine] = {}


def live_engine(skip_patches: tuple[str, ...] = (), extension: str = EXTENSION, **options: Any) -> LiveEngine:
    """The engine with these settings; one lives at a time, and stays for the next test that asks for the same."""
    key = repr((skip_patches, extension, sorted(options.items())))
    if key not in _live:
        close_all()
        _live[key] = LiveEngine(skip_patches, extension, options)
    return _live[key]


def close_all() -> None:
    """Shut down whatever lives."""
    for live in _live.values():
        live.close()
    _live.clear()


atexit.register(close_all)
