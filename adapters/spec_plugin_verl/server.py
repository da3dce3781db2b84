"""verl's vLLM server, plus the engine front: speculative configuration, refresh, self-test, schedule and counters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, VLLM_LORA_NAME, VLLM_LORA_PATH
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.lora.request import LoRARequest

from spec_plugin.adapter import EngineFront, SpecSession
from spec_plugin_verl.gate import Gate
from spec_plugin_verl.options import read_config, read_target, refuse_unsupported

EXTENSION = "spec_plugin_verl.worker.VerlSpecWorker"


class SpecHttpServer(Gate, vLLMHttpServer):  # type: ignore[misc]
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
        given = {"logprobs_mode": self.config.logprobs_mode, **engine_kwargs}
        ours = self._spec_front.engine_arguments(given, EXTENSION)
        engine_kwargs.update({name: value for name, value in ours.items() if name != "worker_extension_cls"})

    def _resolve_sleep_level(self) -> int:
        """verl's level, which is 2, but at most ``spec.sleep_level``, which is 1.

        Level 1 keeps the weights in the host's memory. After level 2 vLLM 0.24 restores the buffers of the target only (issue
        52479): a refresh brings the draft's back. Newer ones restore both, and were seen to fail when a graph of a draft is
        replayed after that (issue 55013).
        """
        level: int = super()._resolve_sleep_level()
        return min(level, self._spec_front.session.config.sleep_level)

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """verl's generate, on the phase's clock; what is not on the lossless allow-list runs without drafts.

        Log-probs are computed in any case; of what the trainer did not ask for the engine keeps some (``spec_plugin.api.spans``).
        """
        await self.spec_admitted()
        trainer_asked = bool(sampling_params.get("logprobs"))
        options = {name: v for name, v in sampling_params.items() if name not in ("logprobs", "max_new_tokens")}
        async with self._spec_front.sample(prompt_ids, options) as request:
            asked = {**sampling_params, **_cheaply_stated(sampling_params), "extra_args": request.extra_args}
            output = await super().generate(prompt_ids, asked, *args, **kwargs)
            request.completed(output.token_ids, int(self.global_steps or 0), output.log_probs, asked=trainer_asked)
        if not trainer_asked:
            output.log_probs = None
        return output

    async def launch_server(self, *args: Any, **kwargs: Any) -> None:
        """verl's; then the front gets the engine, which exists from here on."""
        await super().launch_server(*args, **kwargs)
        if self.node_rank == 0:
            self._spec_front.engine = self.engine
            await self._spec_front.look_at_draft()  # before it sleeps for the first time
            if self.lora_as_adapter:
                self._spec_front.adapter = LoRARequest(VLLM_LORA_NAME, VLLM_LORA_INT_ID, VLLM_LORA_PATH)


def _cheaply_stated(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Options by which vLLM states the log-prob of every sampled token, and does no more than that.

    verl reads neither the text of an answer nor that of a token, and goes through log-probs place by place. As vLLM makes them by
    default, with a dictionary, an object and a text for each token, they take several times as long as all else in its front end.
    """
    return {"logprobs": True, "flat_logprobs": True, "detokenize": bool(sampling.get("stop"))}


class SpecReplica(vLLMReplica):  # type: ignore[misc]
    """verl's replica, whose servers are ``SpecHttpServer``; reward and teacher models keep verl's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not (self.is_reward_model or self.is_teacher_model):
            self.server_class = ray.remote(SpecHttpServer)
