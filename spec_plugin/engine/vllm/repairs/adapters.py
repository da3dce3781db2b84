"""What vLLM's first model runner needs where an engine serves LoRA adapters beside a draft."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch as set_for_now

from torch import nn

from spec_plugin.engine.vllm.repairs.patches import Guard, Patch


def _wrapped_embedding() -> nn.Module:
    """An embedding wrapped for LoRA as in an engine with adapters, without adapter weights."""
    from vllm.lora.layers.base import BaseLayerWithLoRA

    class Wrapped(BaseLayerWithLoRA):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Embedding(4, 2)

        @property
        def weight(self) -> Any:
            return self.base_layer.weight

    return Wrapped()


def shares_the_wrapper(share: Callable[..., Any]) -> bool:
    """True if a draft without an embedding of its own gets the target's with the adapters around it."""
    wrapped = _wrapped_embedding()
    target = SimpleNamespace(model=SimpleNamespace(embed_tokens=wrapped))
    draft = SimpleNamespace(has_own_embed_tokens=False, model=SimpleNamespace(embed_tokens=nn.Embedding(4, 2)))
    # the worker that asks has no process groups yet
    alone = {"get_pp_group": lambda: SimpleNamespace(world_size=1)}
    with set_for_now.dict(inspect.unwrap(share).__globals__, alone):
        share(SimpleNamespace(model=draft), target)
    return draft.model.embed_tokens is wrapped


def with_bare_embedding(original: Callable[..., Any]) -> Callable[..., Any]:
    """The original, after which a draft that got the wrapped embedding gets the bare one inside."""

    @functools.wraps(original)
    def _maybe_share_embeddings(self: Any, target_language_model: Any) -> None:
        from vllm.lora.layers.base import BaseLayerWithLoRA

        original(self, target_language_model)
        inner = self.model.model
        if isinstance(embed := getattr(inner, "embed_tokens", None), BaseLayerWithLoRA):
            inner.embed_tokens = embed.base_layer

    return _maybe_share_embeddings


#: for an engine that serves adapters and drafts, before the models are loaded
ADAPTER_PATCHES = (
    Patch(
        name="bare_embedding",
        symbol="vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._maybe_share_embeddings",
        reason="a draft that shares the target's embedding ran its LoRA kernel with the metadata of the target's batch, and "
        "the engine died of it",
        upstream="right in vLLM's second model runner (v1/worker/gpu/spec_decode/eagle/utils.py), not in the first; no issue "
        "that we know",
        versions="0.24–0.33, run on 0.29.0, sources read of 0.24.0",
        needed=shares_the_wrapper,
        replacement=with_bare_embedding,
        guard=Guard(
            parameters=("self", "target_language_model"),
            landmarks=("self.model.model.embed_tokens = target_embed_tokens", "has_own_embed_tokens"),
        ),
        optional=True,
    ),
)
