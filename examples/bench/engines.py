"""vLLM engines for the benchmarks, in this process so that each step can be timed: a plain one, and one with the flag on.

Build the plain engine first: it must be what a user has without spec-plugin, and the flag's CPU repairs hold for
everything that the process loads after them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from examples.bench.common import Seconds, now, say, spread
from spec_plugin.engine.counters import read_spec_counters
from spec_plugin.engine.scheduler import SCHEDULER

EXTENSION = "spec_plugin.engine.extension.SpecWorkerExtension"


@dataclass(frozen=True)
class EngineSettings:
    """What both engines have in common."""

    dtype: str = "float32"
    max_num_seqs: int = 64
    max_model_len: int = 512
    memory_share: float = 0.4  # of a GPU, for each engine
    eager: bool = True  # CUDA graphs off; on a CPU there are none


@dataclass
class Timing:
    """One batch of requests: all of it, and its steps."""

    total: Seconds = field(default_factory=lambda: Seconds(0.0, 0.0))
    steps: list[Seconds] = field(default_factory=list)  # the first one is the prefill
    full: int = 0  # how many of the later steps had the whole batch in them
    drafts: int = 0  # verification steps, summed over requests
    accepted: int = 0
    outputs: list[list[int]] = field(default_factory=list)  # in the order of the prompts
    reasons: list[str] = field(default_factory=list)  # why each request ended

    def rate(self, clock: str) -> float:
        """Tokens per second by one clock, ``wall`` or ``cpu``."""
        return sum(map(len, self.outputs)) / float(getattr(self.total, clock))

    def step(self, clock: str) -> float:
        """Median seconds of a decoding step with the whole batch."""
        return spread([getattr(s, clock) for s in self.steps[1 : 1 + self.full]]).median

    def prefill(self, clock: str) -> float:
        """Seconds of the first step."""
        return float(getattr(self.steps[0], clock))

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification step; 1.0 where nothing was drafted."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0


class Engine:
    """One engine that is stepped by hand."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.engine = llm, llm.llm_engine
        self.max_num_seqs: int = self.engine.vllm_config.scheduler_config.max_num_seqs
        self._requests = 0

    def set_k(self, k: int) -> None:
        """Rewrite the engine's table of k while it is idle, as the adapter does: a draft that nothing uses is paused."""
        core: Any = self.engine.engine_core
        core.engine_core.spec_set_schedule([k] * (self.max_num_seqs + 1))
        self.rpc("spec_pause_draft", k == 0)

    def pause_draft(self, paused: bool) -> None:
        """Leave the draft's forward pass out while k is 0, or run it again."""
        self.rpc("spec_pause_draft", paused)

    def rpc(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What the first worker answers."""
        return self.llm.collective_rpc(method, args=args, kwargs=kwargs)[0]

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams, between: Any = None) -> Timing:
        """Generate for all prompts at once.

        Args:
            prompts: token ids.
            params: for every request.
            between: called after every step, with requests in flight.
        """
        timing, before, done = Timing(), read_spec_counters(), {}
        began = now()
        first, self._requests = self._requests, self._requests + len(prompts)
        for i, prompt in enumerate(prompts):
            self.engine.add_request(str(first + i), {"prompt_token_ids": list(prompt)}, params)
        while self.engine.has_unfinished_requests():
            clock = now()
            finished = self.engine.step()
            timing.full += bool(timing.steps) and not done
            timing.steps.append(now() - clock)
            for output in finished:
                done[int(output.request_id) - first] = output.outputs[0]
            if between is not None and self.engine.has_unfinished_requests():
                between()
        timing.total = now() - began
        after = read_spec_counters()
        timing.drafts, timing.accepted = (after[n] - before[n] for n in ("drafts", "accepted_tokens"))
        timing.outputs = [list(done[i].token_ids) for i in range(len(prompts))]
        timing.reasons = [str(done[i].finish_reason) for i in range(len(prompts))]
        return timing


def sampling(temperature: float, tokens: int) -> SamplingParams:
    """Exactly ``tokens`` tokens, and the log-prob of each, which RL trainers ask for."""
    return SamplingParams(
        temperature=temperature,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def plain_engine(target: Path, settings: EngineSettings) -> Engine:
    """vLLM as it is without spec-plugin."""
    return Engine(LLM(model=str(target), **_options(settings)))


def live_engine(target: Path, settings: EngineSettings) -> Engine:
    """A plain engine whose weights can change, which every trainer needs: vLLM's CPU build packs them away otherwise."""
    return Engine(LLM(model=str(target), worker_extension_cls=EXTENSION, **_options(settings)))


def flag_engine(target: Path, draft: Path, k: int, settings: EngineSettings) -> Engine:
    """vLLM as the flag starts it: draft, worker extension, control channel; ``k`` is the most that it may draft."""
    speculative = {
        "method": "eagle3",
        "model": str(draft),
        "num_speculative_tokens": k,
        "num_speculative_tokens_per_batch_size": [(1, settings.max_num_seqs, k)],
        "draft_load_config": {"load_format": "auto"},
        "draft_sample_method": "greedy",
        "rejection_sample_method": "standard",
    }
    extras = {"scheduler_cls": SCHEDULER, "worker_extension_cls": EXTENSION}
    return Engine(LLM(model=str(target), speculative_config=speculative, **extras, **_options(settings)))


def start(target: Path, draft: Path, k: int, settings: EngineSettings) -> dict[str, Engine]:
    """The engines of a comparison by name: ``plain``, ``flag`` and, on a CPU, ``live``."""
    say("starting a plain engine")
    engines = {"plain": plain_engine(target, settings)}  # first: before any repair is in force
    if engines["plain"].engine.vllm_config.device_config.device_type == "cpu":
        say("starting a plain engine whose weights can change")
        engines["live"] = live_engine(target, settings)
    say("starting an engine with the flag on")
    engines["flag"] = flag_engine(target, draft, k, settings)  # last: its counters are the ones that are read
    return engines


def _options(settings: EngineSettings) -> dict[str, Any]:
    return {
        "skip_tokenizer_init": True,
        "dtype": settings.dtype,
        "max_num_seqs": settings.max_num_seqs,
        "max_model_len": settings.max_model_len,
        "gpu_memory_utilization": settings.memory_share,
        "enforce_eager": settings.eager,
        "enable_prefix_caching": False,
        "disable_log_stats": False,  # vLLM counts acceptance only then
        "logprobs_mode": "processed_logprobs",
        "seed": 0,
    }
