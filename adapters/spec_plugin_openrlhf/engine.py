"""OpenRLHF's vLLM actor, plus the engine front: speculation, versions, log-probs for the guard, refresh, self-test, k."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

from openrlhf.trainer.ray import vllm_engine

from spec_plugin.adapter import (
    PARTS,
    EngineFront,
    SelfTestPart,
    SelfTestReport,
    SleepState,
    SpecConfig,
    SpecEngineMethods,
    SpecSession,
    TargetInfo,
    configure_logging,
    stand_aside,
)
from spec_plugin_openrlhf.ray_classes import undecorated

EXTENSION = "spec_plugin_openrlhf.worker.OpenRLHFSpecWorker"


class SpecRolloutRayActor(SpecEngineMethods, undecorated(vllm_engine.RolloutRayActor, "RolloutRayActor")):  # type: ignore[misc]
    """One vLLM engine as a Ray actor, OpenRLHF's with ``EngineFront`` around its requests."""

    spec_config: SpecConfig  # set by ``registration.install``
    spec_target: TargetInfo

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]  # Ray awaits it
        """OpenRLHF's arguments, plus ours; ``args`` is empty there.

        Raises:
            SpecConfigError: if the engine would not be lossless.
        """
        from transformers import AutoTokenizer

        configure_logging()
        self._spec_sleep = SleepState()
        target = replace(self.spec_target, max_num_seqs=_max_num_seqs(kwargs))
        tokenizer = AutoTokenizer.from_pretrained(kwargs["model"], trust_remote_code=kwargs["trust_remote_code"])
        self._spec_front = EngineFront(SpecSession(self.spec_config, target), tokenizer)
        kwargs.setdefault("logprobs_mode", "processed_logprobs")  # those of the distribution that is sampled
        await super().__init__(*args, **{**kwargs, **self._spec_front.engine_arguments(kwargs, EXTENSION)})
        self._spec_front.engine = self.llm

    async def generate(self, prompt_token_ids: Any, sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """OpenRLHF's generate, on the phase's clock; what is not on the lossless allow-list runs without drafts."""
        async with self._spec_front.sample(prompt_token_ids, sampling_params) as request:
            sampling_params = copy.copy(sampling_params)
            sampling_params.extra_args = request.extra_args
            output = await super().generate(prompt_token_ids, sampling_params, multi_modal_data)
            request.answered(output.outputs[0])
        return output

    async def generate_responses(
        self, prompt: str, label: str, sampling_params: Any, *args: Any, **kwargs: Any
    ) -> list[dict[str, Any]]:
        """OpenRLHF's, always with log-probs, so that provenance has evidence."""
        if sampling_params.logprobs is None:
            sampling_params = copy.deepcopy(sampling_params)
            sampling_params.logprobs = 0  # the sampled token's only
        responses: list[dict[str, Any]] = await super().generate_responses(
            prompt, label, sampling_params, *args, **kwargs
        )
        return responses

    async def spec_max_num_seqs(self) -> int:
        """``max_num_seqs`` as vLLM chose it for this engine's arguments and machine."""
        return self._spec_front.session.target.max_num_seqs

    async def spec_lives(self) -> None:
        """Return if the engine's processes are alive.

        Raises:
            EngineDeadError: if vLLM's own process is gone.
        """
        await self.llm.check_health()

    async def sleep(self, level: int = 1) -> None:
        """OpenRLHF's; weights and KV cache count as asleep afterwards."""
        await super().sleep(level)
        self._spec_sleep.slept()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """OpenRLHF's; the parts in ``tags`` (None: all) count as awake afterwards."""
        await super().wake_up(tags)
        self._spec_sleep.woke(tags)

    def _spec_woken(self, *parts: str) -> AbstractAsyncContextManager[None]:
        return self._spec_sleep.awake(parts, self.wake_up, self.sleep)

    async def spec_self_test(
        self, seconds: float, engines: int = 1, part: SelfTestPart = SelfTestPart.ALL
    ) -> SelfTestReport:
        """The self-test on this engine (law 2)."""
        async with self._spec_woken(*PARTS), self._spec_running():
            return await super().spec_self_test(seconds, engines, part)

    async def pause_generation(self) -> None:
        """OpenRLHF's, around a weight sync with partial rollouts; it is known how far each request has come."""
        self._spec_front.pausing()
        await super().pause_generation()
        await self._spec_front.paused()

    async def resume_generation(self) -> None:
        """OpenRLHF's; what was in flight goes on with the new weights and the new draft."""
        await super().resume_generation()
        self._spec_front.resumed()

    @asynccontextmanager
    async def _spec_running(self) -> AsyncIterator[None]:
        """Within it requests are scheduled, but none of the trainer's.

        What is in flight stands aside: a draft that has not been tested serves none of it, and the test neither finds its KV
        cache in the way nor its requests in the batches that it measures.
        """
        paused = not self._spec_front.open
        if paused:
            await stand_aside(self.llm, True)
            await super().resume_generation()
        try:
            yield
        finally:
            if paused:
                await super().pause_generation()
                await stand_aside(self.llm, False)
                if self._spec_front.open:  # the trainer has not waited for the test
                    await super().resume_generation()


def _max_num_seqs(kwargs: Mapping[str, Any]) -> int:
    """The batch size that vLLM would choose for these arguments on this machine."""
    import vllm
    from vllm.usage.usage_lib import UsageContext

    ours = ("num_gpus", "bundle_indices", "agent_func_path", "remote_rm_url", "mm_pad_token_ids", "full_determinism")
    arguments = vllm.AsyncEngineArgs(**{name: value for name, value in kwargs.items() if name not in ours})
    config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    return int(config.scheduler_config.max_num_seqs)
