"""vLLM engines for the benchmarks, stepped by hand so that each step can be timed: plain ones, and one with the flag on.

Engines that are compared live in a process each (``Remote``): in one process, each engine that was built later decoded
5 to 12 % faster than the same engine built before it, and the flag's CPU repairs would reach the plain one.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from safetensors.torch import load_file
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from draft_training import digest
from examples.bench.common import Seconds, now, prepare_process, spread
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.events import Schedule, StepPair, StepTiming, TargetInfo
from spec_plugin.engine.front import EngineFront
from spec_plugin.engine.vllm.schedule.channel import RestOfSteps
from spec_plugin.engine.vllm.schedule.counters import read_spec_counters
from spec_plugin.lifecycle.session import SpecSession

Kind = Literal["plain", "live", "stock", "flag"]
EXTENSION = "spec_plugin.engine.vllm.extension.SpecWorkerExtension"


@dataclass(frozen=True)
class EngineSettings:
    """What both engines have in common."""

    dtype: str = "float32"
    max_num_seqs: int = 64
    max_model_len: int = 512
    memory_share: float = 0.4  # of a GPU, for each engine
    kv_gib: float | None = None  # of the KV cache; engines that start together need it: each looks at what is free
    eager: bool = True  # CUDA graphs off; on a CPU there are none
    more: Mapping[str, Any] = field(default_factory=dict)  # engine arguments; they win


@dataclass
class Timing:
    """One batch of requests: all of it, and its steps."""

    total: Seconds = field(default_factory=lambda: Seconds(0.0, 0.0))
    steps: list[Seconds] = field(default_factory=list)  # the first one is the prefill
    full: int = 0  # how many of the later steps had the whole batch in them
    drafts: int = 0  # verification steps, summed over requests
    accepted: int = 0
    per_pos: tuple[int, ...] = ()  # accepted tokens by position
    outputs: list[list[int]] = field(default_factory=list)  # in the order of the prompts
    reasons: list[str] = field(default_factory=list)  # why each request ended

    def rate(self, clock: str) -> float:
        """Tokens per second by one clock, ``wall`` or ``cpu``."""
        return sum(map(len, self.outputs)) / float(getattr(self.total, clock))

    def step(self, clock: str) -> float:
        """Median seconds of a decoding step with the whole batch."""
        return spread([getattr(s, clock) for s in self.steps[1 : 1 + self.full]]).median

    def mean_step(self, clock: str) -> float:
        """Mean seconds of all decoding steps: far above ``step`` where some take much longer than others."""
        seconds = [float(getattr(s, clock)) for s in self.steps[1:]]
        return sum(seconds) / len(seconds) if seconds else 0.0

    def prefill(self, clock: str) -> float:
        """Seconds of the first step."""
        return float(getattr(self.steps[0], clock))

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification step; 1.0 where nothing was drafted."""
        return 1.0 + self.accepted / self.drafts if self.drafts else 1.0


class Engine:
    """One engine that is stepped by hand."""

    def __init__(self, llm: LLM, seconds: float = 0.0) -> None:
        """Take an engine that took so many seconds to start."""
        self.llm, self.engine, self.start_seconds = llm, llm.llm_engine, seconds
        self.max_num_seqs: int = self.engine.vllm_config.scheduler_config.max_num_seqs
        self._requests = 0

    def set_k(self, k: int) -> None:
        """Rewrite the engine's table of k while it is idle, as the adapter does: a draft that nothing uses is paused."""
        self.set_schedule(Schedule((k,) * (self.max_num_seqs + 1)))

    def set_schedule(self, schedule: Schedule) -> None:
        """The same with a k for each batch size, and a guard."""
        core: Any = self.engine.engine_core
        core.engine_core.spec_set_schedule(list(schedule.table), list(schedule.break_even), schedule.plain_share)
        self.pause_draft(not any(schedule.table))

    def set_reading(self) -> None:
        """No drafts from an idle engine, whose draft reads the text all the same: as in plain steps between drafted ones."""
        self.set_k(0)
        self.pause_draft(False)

    def take_pairs(self) -> list[StepPair]:
        """Plain steps beside drafted ones since the last call."""
        core: Any = self.engine.engine_core
        return [StepPair(*row) for row in core.engine_core.spec_take_pairs()]

    def take_steps(self) -> list[StepTiming]:
        """The engine's step log since the last call."""
        core: Any = self.engine.engine_core
        return [StepTiming(*row) for row in core.engine_core.spec_take_steps()]

    def rest_of_steps(self) -> RestOfSteps:
        """What of the log as ``take_steps`` last took it is not in its answer."""
        core: Any = self.engine.engine_core
        return RestOfSteps.of(core.engine_core.spec_rest_of_steps())

    def install(self, file: Path, version: int) -> None:
        """Put the weights of another draft in the place of the present ones.

        Args:
            file: safetensors, as a draft checkpoint has it.
            version: one that was not installed before.
        """
        tensors = load_file(file)
        told = {"version": version, "digest": digest(tensors), "names": list(tensors), "force": True}
        report = self.rpc("spec_install_file", path=str(file), **told)
        if not report["installed"]:
            raise RuntimeError(f"the engine refused the draft {file}: {report['reason']}")

    def pause_draft(self, paused: bool) -> None:
        """Leave the draft's forward pass out while k is 0, or run it again."""
        core: Any = self.engine.engine_core
        core.engine_core.spec_pause(paused)

    def sleep(self, level: int) -> None:
        """Give the card's memory back; a CPU build ignores it."""
        self.llm.sleep(level=level)

    def wake_up(self, tag: str) -> None:
        """Take it again, for ``weights`` or for the ``kv_cache``."""
        self.llm.wake_up(tags=[tag])

    def rpc(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What the first worker answers."""
        return self.llm.collective_rpc(method, args=args, kwargs=kwargs)[0]

    def _settle(self) -> None:
        """Take the batches back that asynchronous scheduling began for requests that had then ended."""
        core: Any = self.engine.engine_core
        for _ in range(8):  # two would do
            if not core.engine_core.batch_queue:
                return
            self.engine.step()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        temperature: float,
        tokens: int | Sequence[int],
        between: Callable[[], None] | None = None,
    ) -> Timing:
        """Generate exactly ``tokens`` tokens for each prompt, all at once.

        Args:
            prompts: token ids.
            temperature: 0 is greedy.
            tokens: per request, or for each one; the end token is ignored.
            between: called after every step, with requests in flight.
        """
        lengths = [tokens] * len(prompts) if isinstance(tokens, int) else list(tokens)
        timing, before, done = Timing(), read_spec_counters(), {}
        began = now()
        first, self._requests = self._requests, self._requests + len(prompts)
        for i, prompt in enumerate(prompts):
            params = sampling(temperature, lengths[i])
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
        self._settle()
        after = read_spec_counters()
        timing.drafts, timing.accepted = (after[n] - before[n] for n in ("drafts", "accepted_tokens"))
        earlier = before["accepted_per_pos"] or [0] * len(after["accepted_per_pos"])
        timing.per_pos = tuple(a - b for a, b in zip(after["accepted_per_pos"], earlier, strict=True))
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


def build(
    kind: Kind,
    target: Path,
    settings: EngineSettings,
    draft: Path | None = None,
    k: int = 0,
    spec: Mapping[str, Any] | None = None,
) -> Engine:
    """Start an engine in this process.

    Args:
        kind: ``plain`` is vLLM as it is without spec-plugin. ``live`` is that with weights that can change, which every
            trainer needs: vLLM's CPU build packs them away otherwise. ``stock`` is vLLM's own speculation with a k that
            cannot change, without anything of spec-plugin. ``flag`` is vLLM as the flag starts it: draft, worker
            extension, control channel.
        target: folder.
        settings: shared by the engines of a comparison.
        draft: folder; for ``stock`` and ``flag``.
        k: most tokens to draft; for these.
        spec: further options of the plugin; for ``flag``.
    """
    options: dict[str, Any] = {"live": {"worker_extension_cls": EXTENSION}}.get(kind, {})
    if kind == "stock":
        options = {"speculative_config": {"method": "eagle3", "model": str(draft), "num_speculative_tokens": k}}
    elif kind == "flag":
        front = flag_front(describe(target, settings.dtype, settings.max_num_seqs), draft, k, spec=spec)
        options = front.engine_arguments(engine_options(settings), EXTENSION)
    began = time.perf_counter()
    llm = LLM(model=str(target), **{**engine_options(settings), **options, **settings.more})
    return Engine(llm, time.perf_counter() - began)


def describe(target: Path, dtype: str, max_num_seqs: int, sampling: Mapping[str, Any] | None = None) -> TargetInfo:
    """What an adapter would tell the plugins of such an engine.

    Args:
        target: folder.
        dtype: of the engine.
        max_num_seqs: of the engine.
        sampling: options of the rollouts.
    """
    from vllm.platforms import current_platform

    config = json.loads((target / "config.json").read_text())
    return TargetInfo(
        path=str(target),
        hf_config=config,
        dtype=dtype,
        device_type=current_platform.device_type,
        max_num_seqs=max_num_seqs,
        sampling=sampling or {},
        actor_dtype=dtype,
    )


def flag_front(
    target: TargetInfo, draft: Path | None, k: int, tokenizer: Any = None, spec: Mapping[str, Any] | None = None
) -> EngineFront:
    """The object that an adapter's engine process has with the flag on."""
    config = SpecConfig.parse({"k": k, "draft": None if draft is None else str(draft), **(spec or {})})
    return EngineFront(SpecSession(config, target), tokenizer)


class Remote:
    """An engine in a process of its own, which sleeps while others run; its answers carry their own timing."""

    def __init__(self, threads: int | None, *args: Any, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        """Begin to start it.

        Args:
            threads: compute threads; None: all cores.
            args: for :func:`build`.
            environment: further variables of its process.
        """
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, threads, args, dict(environment)), daemon=True)
        self._process.start()
        self.start_seconds = 0.0  # that the engine itself took, known after ``wait``

    def wait(self) -> Remote:
        """Until it is ready.

        Raises:
            RuntimeError: if it could not start, with the traceback of its process.
        """
        self.start_seconds = self._answer()
        return self

    def rpc(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See ``Engine.rpc``."""
        return self._ask("rpc", method, *args, **kwargs)

    def run(self, prompts: Sequence[Sequence[int]], temperature: float, tokens: int | Sequence[int]) -> Timing:
        """See ``Engine.run``."""
        timing: Timing = self._ask("run", prompts, temperature, tokens)
        return timing

    def set_k(self, k: int) -> None:
        """See ``Engine.set_k``."""
        self._ask("set_k", k)

    def set_schedule(self, schedule: Schedule) -> None:
        """See ``Engine.set_schedule``."""
        self._ask("set_schedule", schedule)

    def take_steps(self) -> list[StepTiming]:
        """See ``Engine.take_steps``."""
        steps: list[StepTiming] = self._ask("take_steps")
        return steps

    def rest_of_steps(self) -> RestOfSteps:
        """See ``Engine.rest_of_steps``."""
        rest: RestOfSteps = self._ask("rest_of_steps")
        return rest

    def set_reading(self) -> None:
        """See ``Engine.set_reading``."""
        self._ask("set_reading")

    def take_pairs(self) -> list[StepPair]:
        """See ``Engine.take_pairs``."""
        pairs: list[StepPair] = self._ask("take_pairs")
        return pairs

    def install(self, file: Path, version: int) -> None:
        """See ``Engine.install``."""
        self._ask("install", file, version)

    def sleep(self, level: int) -> None:
        """See ``Engine.sleep``."""
        self._ask("sleep", level)

    def wake_up(self, tag: str) -> None:
        """See ``Engine.wake_up``."""
        self._ask("wake_up", tag)

    def pause_draft(self, paused: bool) -> None:
        """See ``Engine.pause_draft``."""
        self._ask("pause_draft", paused)

    def close(self) -> None:
        """End its process."""
        self._process.terminate()
        self._process.join()

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self._pipe.send((method, args, kwargs))
        return self._answer()

    def _answer(self) -> Any:
        try:
            ok, value = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the process of an engine ended") from None
        if not ok:
            raise RuntimeError(f"an engine failed in its process:\n{value}")
        return value


def _serve(pipe: Any, threads: int | None, args: Any, environment: Mapping[str, str]) -> None:
    """What the process of a ``Remote`` does: build, then call what it is asked to, until it is ended."""
    os.environ.update(environment)
    try:
        prepare_process(threads)
        engine = build(*args)
        pipe.send((True, engine.start_seconds))
        while True:
            method, given, named = pipe.recv()
            pipe.send((True, getattr(engine, method)(*given, **named)))
    except EOFError:
        return
    except Exception:
        pipe.send((False, traceback.format_exc()))


def engine_options(settings: EngineSettings) -> dict[str, Any]:
    """Engine arguments that do not depend on the kind of engine."""
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
        **({} if settings.kv_gib is None else {"kv_cache_memory_bytes": int(settings.kv_gib * 2**30)}),
    }
