"""verl's vLLM server, plus the speculative configuration, the refresh's entrance, self-test, schedule and counters."""

from __future__ import annotations

import time
from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from spec_plugin.engine.capabilities import draft_buffers_survive_level_2
from spec_plugin.engine.counters import read_spec_counters
from spec_plugin.engine.lossless import check_engine_options, check_sampling, check_speculative_config
from spec_plugin.engine.scheduler import SCHEDULER, pause_idle_draft, set_schedule
from spec_plugin.engine.selftest import default_prompts, run_self_test
from spec_plugin.events import RefreshReport, RolloutStats, SelfTestReport
from spec_plugin.session import SpecSession
from spec_plugin_verl.options import read_config, read_target, refuse_unsupported

_QUESTIONS = ("12+34=", "What is 7 times 8?", "Name three colours.", "987+654=")


class SpecHttpServer(vLLMHttpServer):  # type: ignore[misc]
    """Ray actor that owns AsyncLLM; ``generate`` also keeps the phase's clock: verl's own is rounded up to 2 s."""

    _spec: SpecSession
    _counters: dict[str, Any]
    _busy: float  # seconds with at least one request in flight, in this rollout phase
    _busy_since: float
    _in_flight: int
    _requests: int
    _tokens: int

    def _validate_configs(self) -> None:
        super()._validate_configs()
        refuse_unsupported(self.config, self.model_config)
        self._spec = SpecSession(read_config(self.config), read_target(self.config, self.model_config))
        self._reset_phase()

    def _get_worker_extension_cls(self) -> str:
        return "spec_plugin_verl.worker.SpecWorker"

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        config = self._spec.speculative_config()
        check_speculative_config(config, device_type=self._spec.target.device_type)
        check_sampling(dict(self._spec.target.sampling))
        check_engine_options({"logprobs_mode": self.config.logprobs_mode})
        engine_kwargs["speculative_config"] = config
        engine_kwargs["scheduler_cls"] = SCHEDULER
        engine_kwargs["disable_log_stats"] = False  # vLLM counts acceptance only then

    def _resolve_sleep_level(self) -> int:
        """verl's level, which is 2; 1 where this vLLM would not restore the draft's buffers (its weights we refresh)."""
        level: int = super()._resolve_sleep_level()
        return level if draft_buffers_survive_level_2() else min(level, 1)

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """verl's generate; the time with at least one request in flight is the phase's generation time."""
        if self._in_flight == 0:
            self._busy_since = time.perf_counter()
        self._in_flight += 1
        try:
            output = await super().generate(*args, **kwargs)
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._busy += time.perf_counter() - self._busy_since
        self._requests += 1
        self._tokens += len(output.token_ids)
        return output

    async def spec_refresh(
        self, use_shm: bool, version: int, digest: str, names: list[str], force: bool, timeout_s: float
    ) -> RefreshReport:
        """Have every worker receive, verify and install one draft."""
        kwargs = {
            "use_shm": use_shm,
            "version": version,
            "digest": digest,
            "names": names,
            "force": force,
            "timeout_s": timeout_s,
        }
        reports = await self.engine.collective_rpc("spec_receive_draft", kwargs=kwargs)
        first = reports[0]
        return RefreshReport(
            installed=all(r["installed"] for r in reports),
            draft_version=first["draft_version"],
            digest=first["digest"],
            milliseconds=first["milliseconds"],
            reason="; ".join(r["reason"] for r in reports if r["reason"]),
        )

    async def spec_set_schedule(self, table: list[int]) -> None:
        """k per batch size for the coming rollout phase; a draft that no batch size uses is paused.

        verl has just reset the prefix cache (every weight sync does), so no request meets a hole in the draft's KV cache.
        """
        await set_schedule(self.engine, table)
        await pause_idle_draft(self.engine, table)

    async def spec_self_test(self, seconds: float) -> SelfTestReport:
        """The start-up self-test on this engine (law 2), within a time limit."""
        config, target = self._spec.config, self._spec.target
        vocab_size = min(len(self.model_config.tokenizer), target.hf_config["vocab_size"])
        await pause_idle_draft(self.engine, [config.k])
        report = await run_self_test(
            self.engine,
            prompts=_test_prompts(self.model_config.tokenizer, vocab_size, config.seed),
            sampling=dict(target.sampling),
            k=config.k,
            vocab_size=vocab_size,
            alpha=config.self_test_alpha,
            seconds=seconds,
            max_num_seqs=target.max_num_seqs,
        )
        self._reset_phase()
        return report

    async def spec_rollout_start(self) -> None:
        """A rollout phase begins: counters and clock start anew."""
        self._reset_phase()

    async def spec_rollout_stats(self, policy_version: int) -> RolloutStats:
        """What happened since ``spec_rollout_start``."""
        now, then = read_spec_counters(), self._counters
        before = then["accepted_per_pos"] or [0] * len(now["accepted_per_pos"])
        return RolloutStats(
            policy_version=policy_version,
            requests=self._requests,
            tokens=self._tokens,
            seconds=self._busy,
            drafts=now["drafts"] - then["drafts"],
            draft_tokens=now["draft_tokens"] - then["draft_tokens"],
            accepted_tokens=now["accepted_tokens"] - then["accepted_tokens"],
            accepted_per_pos=tuple(n - b for n, b in zip(now["accepted_per_pos"], before, strict=True)),
        )

    def _reset_phase(self) -> None:
        self._busy = self._busy_since = 0.0
        self._in_flight = self._requests = self._tokens = 0
        self._counters = read_spec_counters()


def _test_prompts(tokenizer: Any, vocab_size: int, seed: int) -> list[list[int]]:
    """Short questions, on which a policy is surer than on noise, and random tokens, on which it is not."""
    asked = [tokenizer(text)["input_ids"] for text in _QUESTIONS]
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": text}] for text in _QUESTIONS]
        asked = [tokenizer.apply_chat_template(c, add_generation_prompt=True)["input_ids"] for c in chats]
    noise = default_prompts(vocab_size, seed=seed)
    return [prompt for pair in zip(asked, noise, strict=False) for prompt in pair]


class SpecReplica(vLLMReplica):  # type: ignore[misc]
    """verl's replica with our server class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not (self.is_reward_model or self.is_teacher_model):
            self.server_class = ray.remote(SpecHttpServer)
