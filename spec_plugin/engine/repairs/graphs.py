"""What the CUDA graphs of vLLM's second model runner need where k changes while it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from spec_plugin.engine.repairs import patches
from spec_plugin.engine.repairs.patches import Guard, Patch, PatchStatus


@dataclass
class _Speculation:
    """The part of vLLM's ``SpeculativeConfig`` that is read."""

    num_speculative_tokens: int = 2
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = None

    def uses_dynamic_speculative_decoding(self) -> bool:
        return self.num_speculative_tokens_per_batch_size is not None


def counts_a_draft_like_its_target(init_candidates: Callable[..., Any]) -> bool:
    """True if a draft, which reads one token a pass, gets graphs for none, or for fewer than none, from a table of k."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    class Manager(CudaGraphManager):  # type: ignore[misc]
        """Of no engine: what a version has and is not set here is None."""

        def __init__(self) -> None:
            table = [(1, 6, 2), (7, 7, 1), (8, 8, 0)]
            self.vllm_config = SimpleNamespace(
                num_speculative_tokens=2,
                speculative_config=_Speculation(num_speculative_tokens_per_batch_size=table),
            )
            self.compilation_config = SimpleNamespace(cudagraph_capture_sizes=[8], max_cudagraph_capture_size=8)
            self.cudagraph_mode, self.decode_query_len, self.max_num_reqs = CUDAGraphMode.FULL_DECODE_ONLY, 1, 8
            self.lora_capture_cases = [0]
            self._candidates: dict[Any, list[Any]] = {}
            self._capture_descs: dict[Any, list[Any]] = {}

        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    manager = Manager()
    try:
        init_candidates(manager)
    except ZeroDivisionError:
        return True
    captured = [graph for graphs in manager._capture_descs.values() for graph in graphs]
    return not captured or any(graph.uniform_token_count != 1 for graph in captured)


def by_its_own_length(original: Callable[..., Any]) -> Callable[..., Any]:
    """The original, which is told of no table where a pass has fewer tokens than a verification of ``spec.k`` has."""

    @functools.wraps(original)
    def _init_candidates(self: Any) -> None:
        config = self.vllm_config
        if config.speculative_config is None or self.decode_query_len > config.num_speculative_tokens:
            original(self)
            return
        self.vllm_config = copy(config)
        self.vllm_config.speculative_config = copy(config.speculative_config)
        self.vllm_config.speculative_config.num_speculative_tokens_per_batch_size = None
        try:
            original(self)
        finally:
            self.vllm_config = config

    return _init_candidates


GRAPH_PATCHES = (
    Patch(
        name="draft_graphs",
        symbol="vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates",
        reason="with full CUDA graphs on the V2 model runner an engine whose k may change did not start (ZeroDivisionError): the "
        "graphs of the draft's own passes were counted as if they verified",
        upstream="mended in 0.32.0, by the same condition",
        versions="seen on a GPU with 0.26.0; 0.25.1–0.31 have it, sources read; run without a GPU on 0.26.0, 0.29.0 and 0.31.0",
        needed=counts_a_draft_like_its_target,
        replacement=by_its_own_length,
        guard=Guard(
            parameters=("self",),
            landmarks=(
                "speculative_config.uses_dynamic_speculative_decoding()",
                "num_speculative_tokens_per_batch_size",
            ),
        ),
        optional=True,
    ),
)


def apply_graph_patches(skip: Collection[str] = ()) -> list[PatchStatus]:
    """Apply them; in an engine that drafts on the V2 model runner with full graphs, before its worker is made.

    Args:
        skip: names of patches to leave out.

    Raises:
        PatchError: if one no longer fits the installed vLLM.
    """
    return patches.apply_each(GRAPH_PATCHES, skip)
