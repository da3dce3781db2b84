"""A synchronous ``LLM`` whose EngineCore lives in the trainer's own process, as the engine that our front talks to."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

from spec_plugin.api.errors import PatchError
from spec_plugin.engine.calls import EngineCalls
from spec_plugin.engine.flight import Request
from spec_plugin.engine.front import EngineFront
from spec_plugin.engine.sleep import SleepState
from spec_plugin.lifecycle.blocking import run_blocking


class InProcessEngine:
    """``spec_plugin.engine.protocol.Engine`` of vLLM's ``LLM``. Nobody but the caller steps it, on the caller's event loop.

    Two threads must not use it at once: vLLM's ``LLM`` has no locks.
    """

    def __init__(self, llm: Any) -> None:
        """Take over the engine of ``llm``.

        Raises:
            PatchError: if its EngineCore is in another process: start it with ``VLLM_ENABLE_V1_MULTIPROCESSING=0``, or, as TRL
                does, with ``distributed_executor_backend="external_launcher"``.
        """
        self.llm, self._engine = llm, llm.llm_engine
        self._core = getattr(self._engine.engine_core, "engine_core", None)
        if self._core is None:
            raise PatchError(
                f"vLLM's {type(self._engine.engine_core).__name__} keeps EngineCore in another process, so this process cannot "
                "reach its scheduler: set VLLM_ENABLE_V1_MULTIPROCESSING=0, or report this"
            )
        self.vllm_config = self._engine.vllm_config
        self.engine_core = self  # of which only ``call_utility_async`` is used
        self._queues: dict[str, asyncio.Queue[Any]] = {}
        self._stepping: asyncio.Task[None] | None = None

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """What the method of ``EngineCore`` returns."""
        return getattr(self._core, method)(*args)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """What a method of the worker extension returns, of each worker."""
        found: list[Any] = self.llm.collective_rpc(
            method, timeout, tuple(args), None if kwargs is None else dict(kwargs)
        )
        return found

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes."""
        return bool(self.llm.reset_prefix_cache())

    async def is_paused(self) -> bool:
        """Never: no request is in flight while anything else happens in this process."""
        return False

    async def list_loras(self) -> set[int]:
        """Ids of the LoRA adapters that the engine holds."""
        found: set[int] = self._engine.list_loras() if self.vllm_config.lora_config is not None else set()
        return found

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, lora_request: Any = None
    ) -> AsyncIterator[Any]:
        """vLLM's ``RequestOutput``s of one request; all that are in flight share the engine's steps."""
        queue = self._queues[request_id] = asyncio.Queue()
        finished = False
        try:
            self._engine.add_request(request_id, prompt, sampling_params, lora_request=lora_request)
            if self._stepping is None or self._stepping.done():
                self._stepping = asyncio.get_running_loop().create_task(self._step())
            while not finished:
                output = await queue.get()
                if isinstance(output, BaseException):
                    raise output
                finished = output.finished
                yield output
        finally:
            del self._queues[request_id]
            if not finished:
                self._engine.abort_request([request_id])

    async def _step(self) -> None:
        try:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    if (queue := self._queues.get(output.request_id)) is not None:
                        queue.put_nowait(output)
                await asyncio.sleep(0)
        except Exception as error:
            for queue in self._queues.values():
                queue.put_nowait(error)


class InProcessCalls(EngineCalls):
    """What the actor asks of such an engine, and each batch of the trainer's requests to it.

    A trainer that puts its engine to sleep finds it as it was after each call.
    """

    def __init__(self, front: EngineFront, llm: Any) -> None:
        """Give the front its engine.

        Args:
            front: of this engine.
            llm: vLLM's ``LLM``, built with ``front.engine_arguments``. From here on ``sleep``, ``wake_up`` and ``generate`` of
                this object are ours, around vLLM's own.
        """
        super().__init__(front)
        front.engine = InProcessEngine(llm)
        self._sleeping = SleepState()
        self._vllm = {name: getattr(llm, name) for name in ("generate", "sleep", "wake_up")}
        llm.generate, llm.sleep, llm.wake_up = self._generate, self._sleep, self._wake_up

    def _sleep(self, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        """vLLM's. Level 2 would drop the draft, which only a refresh brings back: the trainer's own weights it sends anyway."""
        self._sleeping.slept()
        kept = level if self._spec_front.session.config.sleep_level > 1 else min(level, 1)
        return self._vllm["sleep"](kept, *args, **kwargs)

    def _wake_up(self, tags: list[str] | None = None) -> Any:
        self._sleeping.woke(tags)
        return self._vllm["wake_up"](tags)

    def _spec_woken(self, *parts: str) -> AbstractAsyncContextManager[None]:
        async def wake_up(parts: list[str]) -> None:
            self._wake_up(parts)

        async def sleep() -> None:
            self._sleep(1)

        return self._sleeping.awake(parts, wake_up, sleep)

    def _generate(self, prompts: Any, sampling_params: Any = None, **kwargs: Any) -> Any:
        """vLLM's ``LLM.generate``: all requests on the phase's clock, each with what makes it one of the control group."""
        return run_blocking(self._sampled(prompts, sampling_params, kwargs))

    async def _sampled(self, prompts: Any, sampling_params: Any, kwargs: dict[str, Any]) -> Any:
        llm = self._spec_front.engine.llm
        one = llm.get_default_sampling_params() if sampling_params is None else sampling_params
        prompts = prompts if isinstance(prompts, Sequence) and not isinstance(prompts, str) else [prompts]
        given = list(one) if isinstance(one, Sequence) else [one] * len(prompts)
        async with AsyncExitStack() as stack:
            texts: list[list[int]] = [[] for _ in given]  # vLLM says which tokens a prompt has become
            requests = [
                await stack.enter_async_context(self._spec_front.sample(text, params))
                for text, params in zip(texts, given, strict=True)
            ]
            ours = [_with_evidence(params, request) for params, request in zip(given, requests, strict=True)]
            outputs = self._vllm["generate"](prompts, ours, **kwargs)
            with self._spec_front.noting("what an engine has answered"):
                for text, params, request, output in zip(texts, given, requests, outputs, strict=True):
                    text[:] = output.prompt_token_ids
                    if len(output.outputs) == 1:
                        request.answered(output.outputs[0], asked=params.logprobs is not None)
        return outputs


def _with_evidence(params: Any, request: Request) -> Any:
    """The request's own options, with log-probs where the trainer wants none: without them nothing can be verified."""
    params = copy.copy(params)
    params.extra_args = request.extra_args
    if params.logprobs is None:
        params.logprobs, params.flat_logprobs = 0, True  # in lists: nobody but us reads them
    return params
