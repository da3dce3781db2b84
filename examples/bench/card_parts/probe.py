"""Worker extensions of the benchmark: what a worker is, and what it keeps on the card."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draft_training import fingerprint
from examples.bench.common import MIB, memory_mib
from spec_plugin.engine.vllm.capabilities import find_draft
from spec_plugin.engine.vllm.extension import SpecWorkerExtension

PROBE = f"{__name__}.Probe"
FLAG_PROBE = f"{__name__}.FlagProbe"
DRAFT_IDS = "draft_id_to_target_id"


class Probe:
    """For an engine without the flag; all names begin with ``bench_``, since vLLM refuses those that its worker has."""

    model_runner: Any
    vllm_config: Any

    def bench_facts(self) -> dict[str, Any]:
        """Which model runner, scheduling and CUDA graphs this engine came to use."""
        from vllm.compilation.counter import compilation_counter

        compilation, runner = self.vllm_config.compilation_config, type(self.model_runner)
        return {
            "runner": "V2" if ".worker.gpu." in f"{runner.__module__}." else "V1",
            "runner_class": f"{runner.__module__}.{runner.__name__}",
            "cudagraph_mode": getattr(compilation.cudagraph_mode, "name", str(compilation.cudagraph_mode)),
            "graph_sizes": len(compilation.cudagraph_capture_sizes or ()),
            "graphs_captured": compilation_counter.num_cudagraph_captured,
            # what vLLM sets aside for them, of GPU workers that do
            "graphs_mib": getattr(self, "cudagraph_memory_estimate", 0) / MIB,
            "async_scheduling": bool(self.vllm_config.scheduler_config.async_scheduling),
        }

    def bench_memory(self, reset: bool = False) -> dict[str, float]:
        """MiB that this process holds and held at most; on a card of its allocator, else of the host.

        Args:
            reset: begin to look for the most from here on (a host's most never falls).
        """
        found = memory_mib(reset=reset)
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            found["card_used"] = (total - free) / MIB
        return found

    def bench_keep_target(self) -> int:
        """Copy the target's weights to the host, for ``bench_restore_target``; how many there are."""
        model = self.model_runner.get_model()
        self._bench_kept = {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters()}
        return len(self._bench_kept)

    def bench_restore_target(self) -> None:
        """Copy them back in place, as a weight sync does."""
        for name, p in self.model_runner.get_model().named_parameters():
            p.data.copy_(self._bench_kept[name])

    def bench_draft_tensors(self) -> dict[str, dict[str, Any]]:
        """Of each parameter and buffer of the draft that is its own: shape, numbers that are not zero, checksum."""
        draft = find_draft(self)
        if draft is None:
            return {}
        theirs = {p.data_ptr() for p in self.model_runner.get_model().parameters()}
        named: list[tuple[str, Tensor]] = [*draft.named_parameters(), *draft.named_buffers()]
        return {name: _described(t) for name, t in named if t.data_ptr() not in theirs}


class FlagProbe(SpecWorkerExtension, Probe):
    """For an engine with the flag."""

    def bench_lost_draft(self) -> bool:
        """Are the draft's weights no longer those that were installed, or first seen."""
        self.spec_look_at_draft()
        return fingerprint(self._spec_layout().parameters) != self._spec_state.served.fingerprint


def _described(tensor: Tensor) -> dict[str, Any]:
    return {
        "shape": list(tensor.shape),
        "nonzero": int((tensor != 0).sum()),
        "checksum": fingerprint({"": tensor}),
    }


def names_of(described: dict[str, dict[str, Any]], ending: str) -> Sequence[str]:
    """The tensors of that name, in whatever module."""
    return [name for name in described if name.split(".")[-1] == ending]
