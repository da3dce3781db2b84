"""verl's vLLM server, plus the engine front: speculative configuration, refresh, self-test, schedule and counters."""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from spec_plugin.engine.capabilities import draft_buffers_survive_level_2
from spec_plugin.engine.front import EngineFront, SpecEngineMethods
from spec_plugin.events import RefreshReport
from spec_plugin.session import SpecSession
from spec_plugin_verl.options import read_config, read_target, refuse_unsupported

EXTENSION = "spec_plugin_verl.worker.SpecWorker"


class SpecHttpServer(SpecEngineMethods, vLLMHttpServer):  # type: ignore[misc]
    """Ray actor that owns AsyncLLM; ``generate`` also keeps the phase's clock: verl's own is rounded up to 2 s."""

    def _validate_configs(self) -> None:
        super()._validate_configs()
        refuse_unsupported(self.config, self.model_config)
        session = SpecSession(read_config(self.config), read_target(self.config, self.model_config))
        self._spec_front = EngineFront(session, self.model_config.tokenizer)

    def _get_worker_extension_cls(self) -> str:
        return EXTENSION

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        given = {**engine_kwargs, "logprobs_mode": self.config.logprobs_mode}
        ours = self._spec_front.engine_arguments(given, EXTENSION)
        engine_kwargs.update({name: value for name, value in ours.items() if name != "worker_extension_cls"})

    def _resolve_sleep_level(self) -> int:
        """verl's level, which is 2; 1 where this vLLM would not restore the draft's buffers (its weights we refresh)."""
        level: int = super()._resolve_sleep_level()
        return level if draft_buffers_survive_level_2() else min(level, 1)

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """verl's generate, on the phase's clock."""
        with self._spec_front.request() as request:
            output = await super().generate(*args, **kwargs)
            request.tokens = len(output.token_ids)
        return output

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        """verl's; the engine is there afterwards."""
        await super().launch_server(*args, **kwargs)
        if self.node_rank == 0:
            self._spec_front.engine = self.engine

    async def spec_receive(self, **kwargs: Any) -> RefreshReport:
        """Have every worker receive, verify and install one draft; see ``SpecWorker.spec_receive_draft``."""
        return await self._spec_front.install("spec_receive_draft", **kwargs)


class SpecReplica(vLLMReplica):  # type: ignore[misc]
    """verl's replica with our server class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not (self.is_reward_model or self.is_teacher_model):
            self.server_class = ray.remote(SpecHttpServer)
