"""OpenRLHF's vLLM actor, plus the engine front: speculation, versions, log-probs for the guard, refresh, self-test, k."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from openrlhf.trainer.ray import vllm_engine

from spec_plugin.config import SpecConfig
from spec_plugin.engine.control import PLAIN_FROM, PLAIN_UNTIL
from spec_plugin.engine.front import EngineFront, SpecEngineMethods, plain_if_unlisted
from spec_plugin.engine.sleep import PARTS, SleepState
from spec_plugin.events import DraftRefresh, EngineState, RefreshReport, SelfTestReport, TargetInfo
from spec_plugin.logs import configure_logging
from spec_plugin.session import SpecSession
from spec_plugin_openrlhf.registration import undecorated

EXTENSION = "spec_plugin_openrlhf.worker.SpecWorker"
#: in the log of each response: the policy version that had begun to sample it
VERSION = "rollout_policy_version"
#: tokens of a request and of what it sampled, and what of them is the control group's
Turn = tuple[tuple[int, ...], dict[str, int]]
#: the turns of the responses to one prompt, under way
_TURNS: ContextVar[list[Turn] | None] = ContextVar("turns", default=None)


class SpecRolloutRayActor(SpecEngineMethods, undecorated(vllm_engine.RolloutRayActor, "RolloutRayActor")):  # type: ignore[misc]
    """One engine."""

    spec_config: SpecConfig  # set by ``registration.install``
    spec_target: TargetInfo
    _spec_paused = False

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
        names = ("temperature", "top_p", "top_k")
        await self._spec_front.arrives({name: getattr(sampling_params, name) for name in names})
        plain_if_unlisted(sampling_params)
        control = None if sampling_params.extra_args else self._spec_front.control()
        if control is not None:
            sampling_params = copy.copy(sampling_params)
            sampling_params.extra_args = control.extra_args
        with self._spec_front.request() as request:
            output = await super().generate(prompt_token_ids, sampling_params, multi_modal_data)
            request.tokens = len(output.outputs[0].token_ids)
        turns = _TURNS.get()
        if turns is not None:
            document = (*prompt_token_ids, *output.outputs[0].token_ids)
            turns.append((document, {} if control is None else control.span(len(prompt_token_ids), request.tokens)))
        return output

    async def generate_responses(
        self, prompt: str, label: str, sampling_params: Any, *args: Any, **kwargs: Any
    ) -> list[dict[str, Any]]:
        """OpenRLHF's, always with log-probs, so that provenance has evidence; each response says its policy version."""
        if sampling_params.logprobs is None:
            sampling_params = copy.deepcopy(sampling_params)
            sampling_params.logprobs = 0  # the sampled token's only
        version = float(self._spec_front.policy_version)
        turns: list[Turn] = []
        token = _TURNS.set(turns)
        try:
            responses: list[dict[str, Any]] = await super().generate_responses(
                prompt, label, sampling_params, *args, **kwargs
            )
        finally:
            _TURNS.reset(token)
        for response in responses:
            span = span_of(response["observation_tokens"], turns)
            ours = {VERSION: version, **{name: float(span.get(name, -1)) for name in (PLAIN_FROM, PLAIN_UNTIL)}}
            response["extra_logs"] = {**(response.get("extra_logs") or {}), **ours}
        return responses

    async def spec_max_num_seqs(self) -> int:
        """Largest batch of this engine."""
        return self._spec_front.session.target.max_num_seqs

    async def sleep(self, level: int = 1) -> None:
        """OpenRLHF's; it is known what sleeps."""
        await super().sleep(level)
        self._spec_sleep.slept()

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """OpenRLHF's; it is known what is back."""
        await super().wake_up(tags)
        self._spec_sleep.woke(tags)

    def _spec_awake(self, *parts: str) -> AbstractAsyncContextManager[None]:
        return self._spec_sleep.awake(parts, self.wake_up, self.sleep)

    async def spec_refresh(self, refresh: DraftRefresh, force: bool, hold: bool = False) -> RefreshReport:
        """The refresh of this engine; before the first rollout a colocated one is asleep."""
        async with self._spec_awake("weights"):
            return await super().spec_refresh(refresh, force, hold)

    async def spec_settle(self, keep: bool) -> None:
        """After a refresh with ``hold``."""
        async with self._spec_awake("weights"):
            await super().spec_settle(keep)

    async def spec_state(self, moment: str) -> EngineState:
        """What the workers hold."""
        async with self._spec_awake("weights"):
            return await super().spec_state(moment)

    async def spec_self_test(self, seconds: float, engines: int = 1) -> SelfTestReport:
        """The self-test on this engine (law 2)."""
        async with self._spec_awake(*PARTS), self._spec_running():
            return await super().spec_self_test(seconds, engines)

    async def pause_generation(self) -> None:
        """OpenRLHF's, around a weight sync with partial rollouts; it is known that nothing is scheduled."""
        await super().pause_generation()
        self._spec_paused = True

    async def resume_generation(self) -> None:
        """OpenRLHF's."""
        self._spec_paused = False
        await super().resume_generation()

    @asynccontextmanager
    async def _spec_running(self) -> AsyncIterator[None]:
        """Within it requests are scheduled: a refresh is complete, and what was in flight goes on with the new weights."""
        paused = self._spec_paused
        if paused:
            await self.resume_generation()
        try:
            yield
        finally:
            if paused:
                await self.pause_generation()


def span_of(document: Sequence[int], turns: Sequence[Turn]) -> dict[str, int]:
    """The control group's stretch in a document: of the one turn that begins it; none where two sampled the same."""
    mine = [span for tokens, span in turns if tuple(document[: len(tokens)]) == tokens]
    spans = [span for span in mine if span]
    return spans[0] if len(mine) == len(spans) == 1 else {}


def _max_num_seqs(kwargs: Mapping[str, Any]) -> int:
    """The batch size that vLLM would choose for these arguments on this machine."""
    import vllm
    from vllm.usage.usage_lib import UsageContext

    ours = ("num_gpus", "bundle_indices", "agent_func_path", "remote_rm_url", "mm_pad_token_ids", "full_determinism")
    arguments = vllm.AsyncEngineArgs(**{name: value for name, value in kwargs.items() if name not in ours})
    config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    return int(config.scheduler_config.max_num_seqs)
