"""The policy's weights on their way to the engines, and what the draft needs of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from verl.workers.rollout.utils import ensure_async_iterator

from spec_plugin.adapter import Reason, SpecPluginError, SpecSession, TargetInfo, shared_with_draft, text_sizes

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

    def copies(self) -> tuple[Tensor | None, Tensor | None]:
        """Embedding and head of the weight sync that has just passed; a target with tied embeddings sends no head."""
        embed = self.kept.get("embed")
        return embed, self.kept.get("head", embed)


class PolicyStream:
    """The streams of one run, and the two tensors where a stream does not bring them: with LoRA adapters in the engine.

    verl's first sync comes in two streams then, the base (``base_sync_done=False``) and the adapters; where the engine has read
    the base itself, and from the second sync on, the adapters come alone. They leave embedding and head as they are.
    """

    def __init__(self, session: SpecSession) -> None:
        """Nothing is known of the base yet."""
        self._session, self._base = session, dict[str, Tensor]()

    def tap(self, weights: Any, peft_config: Any = None, base_sync_done: bool = True, **_theirs: Any) -> PolicyTap:
        """One stream, with verl's other arguments for it."""
        session = self._session
        if peft_config is not None and base_sync_done and not self._base and not session.failed:
            with session.guarded(Reason.REFRESH, "reading the policy's embedding and head"):
                self._base = base_on_disk(session.target, session.copy_of)
        return PolicyTap(weights, session.copy_of, session.target.hf_config)

    def complete(self, tap: PolicyTap, peft_config: Any = None, base_sync_done: bool = True, **_theirs: Any) -> bool:
        """Has the sync come to its end with this stream; the tap then knows both tensors."""
        if peft_config is None:
            return True
        if not base_sync_done:
            self._base = tap.kept
            return False
        tap.kept |= self._base
        return True


def base_on_disk(target: TargetInfo, copy_of: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
    """The two tensors that the draft shares with the policy, [V, H], as its checkpoint has them; adapters leave them as they are.

    Args:
        target: its ``path`` is the folder that the engine has loaded, too.
        copy_of: ``SpecSession.copy_of``.

    Raises:
        SpecPluginError: if the folder does not hold the embedding.
    """
    sizes, kept = text_sizes(target.hf_config), dict[str, Tensor]()
    for file in sorted(Path(target.path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                which = shared_with_draft(name, tensors.get_slice(name).get_shape(), sizes)
                if which is not None and which not in kept and (copy := copy_of(tensors.get_tensor(name))) is not None:
                    kept[which] = copy
    if "embed" not in kept:
        raise SpecPluginError(
            f"{target.path} has no safetensors file with the policy's embedding, which the draft needs: set "
            "actor_rollout_ref.rollout.load_format=dummy, so that verl sends it"
        )
    return kept
