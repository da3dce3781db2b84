"""An engine as the flag starts it on a card, and what is counted of it; a rehearsal is the same on a CPU, without graphs."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import small  # before vLLM
import torch
from drawn import Row
from inspected import Inspected

from examples.bench.card_parts.probe import Probe

REHEARSAL = "SPEC_PLUGIN_GPU_REHEARSAL"
HERE = torch.cuda.is_available()
REHEARSED = not HERE and os.environ.get(REHEARSAL) == "1"
NO_CARD = (
    f"no CUDA device: tests/gpu needs one, ten minutes of it (make gpu-test; {REHEARSAL}=1 rehearses them on a CPU)"
)
DEVICE = torch.device("cuda" if HERE else "cpu")
#: a card's run is in bfloat16; of a CPU, where that is slow, in float32
DTYPE = torch.bfloat16 if HERE else torch.float32
DTYPE_NAME = str(DTYPE).removeprefix("torch.")
#: nats that the likeliest token may lie above one that a greedy request got: two kernels round otherwise
TIE = 0.15 if HERE else 1e-3
#: nats between the engine's log-probs and transformers', in the mean; a correct engine's are nearer
FAR = 0.1 if HERE else 1e-3
K, REQUESTS = 3, 16
#: of the card, for one engine: two may live at a time
SHARE = 0.2
#: V1 and V2
RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")


class Seen(Inspected, Probe):
    """The plugin's worker extension, looked into by the tests of engines and by the benchmark."""


@dataclass
class Graphs:
    """What became of CUDA graphs in a block."""

    captured: list[int] = field(default_factory=list)  # a graph each
    replayed: list[int] = field(default_factory=list)  # a graph for each time
    nbytes: list[int] = field(default_factory=list)  # that vLLM says the capture of all graphs of an engine took


@contextmanager
def graphs() -> Iterator[Graphs]:
    """Count them, whoever in this process captures or replays one; on a CPU nobody does."""
    seen = Graphs()
    graph: Any = torch.cuda.CUDAGraph
    with ExitStack() as stack:
        if HERE:
            for name, found in (("capture_begin", seen.captured), ("replay", seen.replayed)):
                stack.enter_context(patch.object(graph, name, _noting(getattr(graph, name), found)))
            for module in RUNNERS:
                runner: Any = import_module(module).GPUModelRunner
                stack.enter_context(patch.object(runner, "capture_model", _measured(runner.capture_model, seen.nbytes)))
        yield seen


def _noting(original: Any, found: list[int]) -> Any:
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(id(self))
        return original(self, *args, **kwargs)

    return called


def _measured(original: Any, found: list[int]) -> Any:
    def capture_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        taken = original(self, *args, **kwargs)
        found.append(int(taken or 0))
        return taken

    return capture_model


@dataclass
class Started:
    """An engine in this process, with the front that an adapter has, and what its start did with graphs."""

    engine: Any  # examples.bench.engines.Engine
    front: Any
    graphs: Graphs

    @property
    def llm(self) -> Any:
        """vLLM's own."""
        return self.engine.llm

    @property
    def config(self) -> Any:
        """vLLM's own."""
        return self.llm.llm_engine.vllm_config

    def set_k(self, k: int) -> None:
        """For all batch sizes; of an engine that is idle, whose last batches are taken back first."""
        self.engine._settle()
        self.engine.set_k(k)

    def sleep(self, level: int) -> None:
        """Likewise."""
        self.engine._settle()
        self.engine.sleep(level)

    def close(self) -> None:
        """Give the card's memory back."""
        self.llm.llm_engine.engine_core.shutdown()
        self.engine = self.front = None
        gc.collect()
        if HERE:
            torch.cuda.empty_cache()


def start(target: Path, draft: Path, sleeps: bool = False, spec: Mapping[str, Any] | None = None) -> Started:
    """vLLM with its own choice of model runner and graphs, and with what the flag adds to a trainer's options.

    Args:
        target: folder of the policy.
        draft: folder.
        sleeps: can it be put to sleep; vLLM has room for one such engine in a process.
        spec: further options of the plugin.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    from examples.bench.engines import Engine, EngineSettings, describe, engine_options, flag_front
    from spec_plugin.engine.inprocess import InProcessEngine

    if REHEARSED and sleeps:
        from spec_plugin_cpu.sleeping import sleep_on_cpu

        sleep_on_cpu()
    more = {"num_gpu_blocks_override": small.KV_BLOCKS} if REHEARSED else {}
    settings = EngineSettings(DTYPE_NAME, REQUESTS, max_model_len=256, memory_share=SHARE, eager=REHEARSED)
    given = {**engine_options(settings), "enable_sleep_mode": sleeps, **more}
    policy = describe(target, DTYPE_NAME, REQUESTS, {"temperature": 1.0})
    front = flag_front(policy, draft, K, spec=spec)
    with graphs() as seen:
        llm = LLM(model=str(target), **{**given, **front.engine_arguments(given, f"{__name__}.Seen")})
    front.engine = InProcessEngine(llm)
    return Started(Engine(llm), front, seen)


def in_dtype(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights as they are served, so that digests of what was sent and of what is there agree."""
    return {name: t.to(DTYPE) if t.is_floating_point() else t for name, t in tensors.items()}


def assert_likeliest(rows: list[Row], policy: Any) -> None:
    """Each token is the one that transformers finds likeliest, or so near that rounding decides."""
    for prompt, response in rows:
        ids = torch.tensor([prompt + response], device=policy.device)
        with torch.no_grad():
            logits = policy(ids).logits[0, len(prompt) - 1 : -1].float().cpu()
        gaps = logits.amax(-1) - logits.gather(1, torch.tensor(response)[:, None])[:, 0]
        assert float(gaps.max()) <= TIE, (float(gaps.max()), prompt, response)
