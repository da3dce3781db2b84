"""Harvest: copy hidden states out of a forward pass of the target that the trainer runs anyway."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_plugin.actor.decoder import Decoder
from spec_plugin.events import HiddenStates


class SequenceShards(Protocol):
    """Ranks that run one packed row of tokens together, each a part of it (sequence parallelism, ring attention)."""

    rank: int
    size: int
    group: Any  # of these ranks

    def whole(self, part: Tensor) -> Tensor:
        """The row of all ranks, [1, N, H] or longer, from this rank's part of it (collective)."""


class PackedShards:
    """Ranks that take one slice each of a packed row, in their order, with padding at its end: Ulysses, ring attention."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """The group of these ranks."""
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def whole(self, part: Tensor) -> Tensor:
        """[1, N, H] from [1, N / size, H] (collective)."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)


class Harvester:
    """Forward hooks on the auxiliary layers and on the final norm of a decoder, present only inside ``capture``.

    ``aux`` are the residual streams that enter the layers ``aux_layers`` (vLLM's EAGLE-3 convention: the state that
    enters layer i is the output of layer i - 1 with the residual added); ``last`` is the output of the final norm.
    """

    def __init__(self, decoder: Decoder, aux_layers: Sequence[int], shards: SequenceShards | None = None) -> None:
        """Bind to a decoder.

        Args:
            decoder: of the policy's language model, see ``find_decoder``.
            aux_layers: ascending layer indices; none: the last states alone. The number of layers is one more index: the
                residual stream that enters the final norm.
            shards: if the decoder sees a part of each row only: then ``take`` is collective, and each rank keeps
                every ``size``-th document, in turn.
        """
        self._shards = shards
        self._turn = (
            0  # documents that were shared out, so that ranks take turns over micro-batches of one document, too
        )
        #: tokens of the documents that the last ``take`` chose, on all ranks that share them together
        self.taken = 0
        self._layers: list[nn.Module] = [[*decoder.layers, decoder.norm][i] for i in aux_layers]
        self._norm = decoder.norm
        self._aux: list[Tensor | None] = [None] * len(self._layers)
        self._last: Tensor | None = None
        self._trouble: Exception | None = (
            None  # of a hook: it runs inside the trainer's forward pass, and must not stop it
        )

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Hook the decoder for the forward passes inside the block; nothing stays behind afterwards."""
        handles = [
            layer.register_forward_pre_hook(self._aux_hook(slot), with_kwargs=True)
            for slot, layer in enumerate(self._layers)
        ]
        handles.append(self._norm.register_forward_hook(self._norm_hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _aux_hook(self, slot: int) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            try:
                self._aux[slot] = (args[0] if args else kwargs["hidden_states"]).detach()
            except Exception as error:  # law 6; ``take`` raises it
                self._trouble = error

        return hook

    def _norm_hook(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        try:
            self._last = output.detach()
        except Exception as error:  # law 6
            self._trouble = error

    def check(self) -> None:
        """Did the last forward pass leave what ``take`` packs.

        Raises:
            RuntimeError: if no forward pass was captured.
        """
        if self._trouble is not None:
            raise RuntimeError(f"the decoder's layers were not called as expected: {self._trouble}") from self._trouble
        if self._last is None or any(a is None for a in self._aux):
            raise RuntimeError("nothing was captured: the forward pass did not go through the hooked layers")

    def forget(self) -> None:
        """Let go of what the last forward pass left."""
        self._aux, self._last, self._trouble, self.taken = [None] * len(self._layers), None, None, 0

    def take(
        self,
        input_ids: Sequence[Tensor],
        loss_masks: Sequence[Tensor],
        policy_version: int,
        max_tokens: int,
        cut_long: bool = False,
    ) -> HiddenStates | None:
        """Pack what the last forward pass left, whole documents, and let go of it.

        Args:
            input_ids: token ids of each document, [n_i] int64, in the order of the batch.
            loss_masks: True where the policy sampled the token, [n_i] bool; see ``response_at_the_end``.
            policy_version: version of the weights that ran.
            max_tokens: documents that would exceed it are left out.
            cut_long: where none is as short as that, take the last ``max_tokens`` of the first one.

        Returns:
            The packed documents on the CPU, or None when there is none for this rank.

        Raises:
            RuntimeError: if no forward pass was captured, or its shape does not fit ``input_ids``.
        """
        began = time.perf_counter()
        self.taken = 0
        try:
            self.check()
        finally:
            last, self._trouble = self._last, None
        assert last is not None
        states = [a for a in self._aux if a is not None] + [last]
        self._aux, self._last = [None] * len(self._layers), None
        lengths = [len(ids) for ids in input_ids]
        fitting, cut = chosen(lengths, max_tokens, cut_long)
        self.taken = sum(min(lengths[i], cut) for i in fitting)
        if self._shards is not None and fitting:
            whole, size, rank = self._shards.whole, self._shards.size, self._shards.rank
            turn, self._turn = self._turn, self._turn + len(fitting)
            fitting = [i for n, i in enumerate(fitting) if (turn + n) % size == rank]
            packed = [_select(whole(s), lengths, fitting) for s in states]
        else:
            packed = [_select(s, lengths, fitting) for s in states]
        if not fitting:
            return None
        packed = packed if len(fitting) > 1 else [s[-cut:] for s in packed]
        return HiddenStates(
            input_ids=torch.cat([input_ids[i][-cut:] for i in fitting]).cpu(),
            aux=torch.cat([packed[-1][:, :0], *packed[:-1]], dim=-1).cpu(),
            last=packed[-1].cpu(),
            loss_mask=torch.cat([loss_masks[i][-cut:] for i in fitting]).bool().cpu(),
            lengths=tuple(min(lengths[i], cut) for i in fitting),
            policy_version=policy_version,
            milliseconds=(time.perf_counter() - began) * 1e3,
        )


def responses_at_the_end(documents: Sequence[Tensor], responses: Sequence[int]) -> list[Tensor]:
    """Masks of whole documents whose last tokens, so many each, are the response."""
    return [torch.arange(len(d)) >= len(d) - n for d, n in zip(documents, responses, strict=True)]


def response_at_the_end(length: int, response: Tensor) -> Tensor:
    """Mask of a whole document, [length] bool, from the mask of the response that ends it, [r]."""
    return torch.cat([torch.zeros(length - len(response), dtype=torch.bool), response.bool().cpu()])


def chosen(lengths: Sequence[int], max_tokens: int, cut_long: bool = False) -> tuple[list[int], int]:
    """Indices of the documents whose tokens together stay within ``max_tokens``, and how many tokens of each at most.

    One too many is passed over; where all are, and ``cut_long``, the first is taken and cut.
    """
    fitting, longest = _fitting(lengths, max_tokens), max(lengths, default=0)
    return ([0], max_tokens) if cut_long and not fitting and min(longest, max_tokens) > 0 else (fitting, longest)


def _fitting(lengths: Sequence[int], max_tokens: int) -> list[int]:
    total, out = 0, []
    for i, n in enumerate(lengths):
        if total + n <= max_tokens:
            out.append(i)
            total += n
    return out


def _select(state: Tensor, lengths: Sequence[int], documents: Sequence[int]) -> Tensor:
    """Rows of the chosen documents, [n, H], from a padded [B, T, H] or packed [1, N, H] tensor."""
    if not documents:
        return state[0, :0]
    if state.shape[0] == len(lengths) and state.shape[1] >= max(lengths):
        return torch.cat([state[i, : lengths[i]] for i in documents])
    if state.shape[0] != 1 or state.shape[1] < sum(lengths):
        raise RuntimeError(
            f"hidden states of shape {tuple(state.shape)} do not fit documents of lengths {list(lengths)}"
        )
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n)
    return torch.cat([state[0, starts[i] : starts[i] + lengths[i]] for i in documents])
