"""What the engine's side asks of an engine: ``AsyncLLM`` has it all, ``InProcessEngine`` gives it to a synchronous ``LLM``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol


class EngineCoreCalls(Protocol):
    """The way to vLLM's ``EngineCore``."""

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """What the method of ``EngineCore`` returns."""


class Engine(Protocol):
    """A running vLLM engine; names and arguments are ``AsyncLLM``'s."""

    @property
    def vllm_config(self) -> Any:
        """vLLM's ``VllmConfig``."""

    @property
    def engine_core(self) -> EngineCoreCalls:
        """The way to the scheduler, see ``spec_plugin.engine.vllm.schedule.channel``."""

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, lora_request: Any = None
    ) -> AsyncIterator[Any]:
        """vLLM's ``RequestOutput``s of one request, as they come."""

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """What a method of the worker extension returns, of each worker."""

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; only their blocks that no request holds."""

    async def is_paused(self) -> bool:
        """Are requests in flight kept from going on."""

    async def list_loras(self) -> set[int]:
        """Ids of the LoRA adapters that the engine holds."""
