"""verl's vLLM server, plus the engine front: speculative configuration, refresh, self-test, schedule and counters."""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from spec_plugin.engine.capabilities import draft_buffers_survive_level_2
from spec_plugin.engine.front import EngineFront
from spec_plugin.events import EngineState, RefreshReport, RolloutStats, SelfTestReport
from spec_plugin.session import SpecSession
from spec_plugin_verl.options import read_config, read_target, refuse_unsupported

EXTENSION = "spec_plugin_verl.worker.SpecWorker"


class SpecHttpServer(vLLMHttpServer):  # type: ignore[misc]
    """Ray actor that owns AsyncLLM; ``generate`` also keeps the phase's clock: verl's own is rounded up to 2 s."""

    _front: EngineFront

    def _validate_configs(self) -> None:
        super()._validate_configs()
        refuse_unsupported(self.config, self.model_config)
        session = SpecSession(read_config(self.config), read_target(self.config, self.model_config))
        self._front = EngineFront(session, self.model_config.tokenizer)

    def _get_worker_extension_cls(self) -> str:
        return EXTENSION

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        given = {**engine_kwargs, "logprobs_mode": self.config.logprobs_mode}
        ours = self._front.engine_arguments(given, EXTENSION)
        engine_kwargs.update({name: value for name, value in ours.items() if name != "worker_extension_cls"})

    def _resolve_sleep_level(self) -> int:
        """verl's level, which is 2; 1 where this vLLM would not restore the draft's buffers (its weights we refresh)."""
        level: int = super()._resolve_sleep_level()
        return level if draft_buffers_survive_level_2() else min(level, 1)

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """verl's generate, on the phase's clock."""
        with self._front.request() as request:
            output = await super().generate(*args, **kwargs)
            request.tokens = len(output.token_ids)
        return output

    async def spec_refresh(self, **kwargs: Any) -> RefreshReport:
        """Have every worker receive, verify and install one draft; see ``SpecWorker.spec_receive_draft``."""
        self._front.engine = self.engine
        return await self._front.install("spec_receive_draft", **kwargs)

    async def spec_set_schedule(self, table: list[int]) -> None:
        """k per batch size for the coming rollout phase."""
        self._front.engine = self.engine
        await self._front.set_schedule(table)

    async def spec_self_test(self, seconds: float) -> SelfTestReport:
        """The start-up self-test on this engine (law 2), within a time limit."""
        self._front.engine = self.engine
        return await self._front.self_test(seconds)

    async def spec_rollout_start(self, policy_version: int) -> None:
        """A rollout phase begins."""
        self._front.start_phase(policy_version)

    async def spec_rollout_stats(self, policy_version: int) -> RolloutStats:
        """What happened since ``spec_rollout_start``."""
        return self._front.stats(policy_version)

    async def spec_state(self, moment: str) -> EngineState:
        """What the workers hold, for ``spec.audit``."""
        self._front.engine = self.engine
        return await self._front.state(moment)


class SpecReplica(vLLMReplica):  # type: ignore[misc]
    """verl's replica with our server class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not (self.is_reward_model or self.is_teacher_model):
            self.server_class = ray.remote(SpecHttpServer)
