"""The policy's weights on their way to the engines, and what the draft needs of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from verl.workers.rollout.utils import ensure_async_iterator

from spec_plugin.actor.decoder import shared_with_draft, text_sizes
from spec_plugin.events import WeightSync

#: seconds in which all servers must have the weights of a sync, and their memory back; a later one is not waited for
SYNC_TIMEOUT_S = 600.0


class PolicyTap:
    """Passes the weight stream on, whatever happens here, and keeps copies of the two tensors that the draft shares."""

    def __init__(
        self, weights: Any, copy_of: Callable[[Tensor], Tensor | None], hf_config: Mapping[str, Any] | None = None
    ) -> None:
        """The stream, ``SpecSession.copy_of``, and the target's config.json, whose sizes tell the two tensors from others."""
        self._weights, self._copy_of = weights, copy_of
        self._sizes = text_sizes(hf_config or {})
        self.kept: dict[str, Tensor] = {}

    def _keep(self, name: str, tensor: Tensor) -> tuple[str, Tensor]:
        which = shared_with_draft(name, tensor.shape, self._sizes)
        if which is not None and which not in self.kept:
            copy = self._copy_of(tensor)
            if copy is not None:
                self.kept[which] = copy
        return name, tensor

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._weights:
            yield self._keep(name, tensor)

    async def __aiter__(self) -> AsyncIterator[tuple[str, Tensor]]:
        async for name, tensor in ensure_async_iterator(self._weights):
            yield self._keep(name, tensor)

    def event(self, policy_version: int) -> WeightSync:
        """The weight sync that has just passed; a target with tied embeddings sends no head."""
        embed = self.kept.get("embed")
        return WeightSync(policy_version, embed, self.kept.get("head", embed))
