"""What the CUDA graphs of vLLM's second model runner need where k changes while it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

from spec_plugin.engine.vllm.repairs.patches import Guard, Patch


@dataclass
class _Speculation:
    """The part of vLLM's ``SpeculativeConfig`` that is read."""

    num_speculative_tokens: int = 2
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = None

    def uses_dynamic_speculative_decoding(self) -> bool:
        return self.num_speculative_tokens_per_batch_size is not None


def graphs_are_missed(init_candidates: Callable[..., Any]) -> bool:
    """True if a draft's own passes are counted as if they verified, or a verification misses its graph behind another k's."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    class Manager(CudaGraphManager):  # type: ignore[misc]
        """Of no engine: what a version has and is not set here is None."""

        def __init__(self, length: int) -> None:
            table = [(1, 6, 2), (7, 7, 1), (8, 8, 0)]
            self.vllm_config = SimpleNamespace(
                num_speculative_tokens=2,
                speculative_config=_Speculation(num_speculative_tokens_per_batch_size=table),
                cache_config=SimpleNamespace(use_kda_recoverssm=False),
            )
            self.compilation_config = SimpleNamespace(
                cudagraph_capture_sizes=[1, 2, 4, 8], max_cudagraph_capture_size=8
            )
            self.cudagraph_mode, self.decode_query_len, self.max_num_reqs = CUDAGraphMode.FULL_DECODE_ONLY, length, 8
            self.lora_capture_cases = [0]
            self._candidates: dict[Any, list[Any]] = {}
            self._capture_descs: dict[Any, list[Any]] = {}

        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    draft, target = Manager(1), Manager(3)
    try:
        init_candidates(draft)
        init_candidates(target)
    except ZeroDivisionError:
        return True
    lengths = [graph.uniform_token_count for graphs in draft._capture_descs.values() for graph in graphs]
    three_plain = [graph.uniform_token_count for graph in target._candidates.get((3, 0), ())]
    return set(lengths) != {1} or 1 not in three_plain


def for_every_k(original: Callable[..., Any]) -> Callable[..., Any]:
    """The original, by which a draft's passes get graphs of their own length, and each k all of its own."""

    @functools.wraps(original)
    def _init_candidates(self: Any) -> None:
        config = self.vllm_config
        if config.speculative_config is None or not config.speculative_config.uses_dynamic_speculative_decoding():
            original(self)
            return
        if self.decode_query_len <= config.num_speculative_tokens:  # the draft's own passes read as many for every k
            self.vllm_config = copy(config)
            self.vllm_config.speculative_config = copy(config.speculative_config)
            self.vllm_config.speculative_config.num_speculative_tokens_per_batch_size = None
        try:
            original(self)
        finally:
            self.vllm_config = config
        _usual_batches(self)
        _offer_each_length(self)

    return _init_candidates


def _usual_batches(manager: Any) -> None:
    """Give each k full graphs for as many requests as plain decoding has them for, and for the most that fit.

    vLLM rounds each size in tokens up to a multiple of k + 1: with k = 7 and its own sizes these are 375 graphs in place of 168,
    each of which takes memory, and yet none for four requests of three tokens. Nor has it one for more requests than the last
    size that the engine takes: of twelve at most nine to twelve would run the draft's own passes, for which there are no
    piecewise graphs, without any.
    """
    sizes, most_tokens = (
        manager.compilation_config.cudagraph_capture_sizes,
        manager.compilation_config.max_cudagraph_capture_size,
    )
    for mode, graphs in manager._capture_descs.items():
        made: list[Any] = []
        for kind, those in _by_kind(graphs).items():
            length = kind.uniform_token_count
            if length is None or getattr(kind, "num_ubatches", 1) > 1:
                made += those
                continue
            most = min(manager.max_num_reqs, most_tokens // length)
            usual = {most, *(n for n in sizes if n < most)}
            made += [replace(those[0], num_tokens=n * length, num_reqs=n) for n in usual]
        manager._capture_descs[mode] = sorted(made, key=lambda graph: graph.num_tokens, reverse=True)


def _by_kind(graphs: Iterable[Any]) -> dict[Any, list[Any]]:
    """Graphs that differ in size alone, smallest first, by one of no size."""
    kinds: dict[Any, list[Any]] = {}
    for graph in sorted(graphs, key=lambda graph: graph.num_tokens):
        kinds.setdefault(replace(graph, num_tokens=0, num_reqs=None), []).append(graph)
    return kinds


def _offer_each_length(manager: Any) -> None:
    """For each number of tokens the smallest graph of each kind that holds them, full ones first.

    vLLM offers the next larger ones only, which may all be of another k: batches then run without the graph that they have.
    """
    kinds = _by_kind(chain.from_iterable(manager._capture_descs.values()))
    # a full graph of one length, one of any length, piecewise ones
    order = sorted(kinds, key=lambda kind: (kind.cg_mode.name != "FULL", kind.uniform_token_count is None))
    manager._candidates.clear()
    for kind in order:
        first = 0
        for graph in kinds[kind]:
            for tokens in range(first, graph.num_tokens + 1):
                manager._candidates.setdefault((tokens, graph.num_active_loras), []).append(graph)
            first = graph.num_tokens + 1


#: for an engine that drafts on the V2 model runner with full graphs, before its worker is made
GRAPH_PATCHES = (
    Patch(
        name="graphs_of_every_k",
        symbol="vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates",
        reason="on the V2 model runner with full CUDA graphs an engine whose k may change did not start (ZeroDivisionError: the "
        "graphs of the draft's own passes were counted as if they verified), and batches missed the graphs of their k",
        upstream="the first mended in 0.32.0, by the same condition; the second vLLM PR 56136, open",
        versions="the first seen on a GPU with 0.26.0; 0.25.1–0.31 have it and 0.25.1–0.32 the second, sources read; run without "
        "a GPU on 0.26.0, 0.29.0, 0.31.0 and 0.32.0",
        needed=graphs_are_missed,
        replacement=for_every_k,
        guard=Guard(
            parameters=("self",),
            landmarks=(
                "speculative_config.uses_dynamic_speculative_decoding()",
                "num_speculative_tokens_per_batch_size",
                "self._candidates",
                "self._capture_descs",
            ),
        ),
        optional=True,
    ),
)
