"""Harvest: copy hidden states out of a forward pass of the target that the trainer runs anyway."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from spec_plugin.actor.control import RolloutControl
from spec_plugin.actor.decoder import Decoder
from spec_plugin.actor.taps import Taps
from spec_plugin.events import HiddenStates
from spec_plugin.ranks import together
from spec_plugin.speculation import Work

#: token ids of whole documents, [n_i], in the order of the batch, and masks of what the policy sampled of them, [n_i] bool
Documents = tuple[Sequence[Tensor], Sequence[Tensor]]
#: each document's rows, [n_i, H], of what a layer was given or gave in one forward pass
Rows = Callable[[Tensor], Sequence[Tensor]]
#: the first step harvests as much as so many others, at most
_FIRST = 4


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
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def whole(self, part: Tensor) -> Tensor:
        """[1, N, H] from [1, N / size, H] (collective)."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)


class HarvestPlan:
    """Which documents of the log-prob passes are harvested, within a budget of tokens, and which rank keeps which of them.

    Ranks that run the same documents together each make this plan, and come to the same one.
    """

    def __init__(self, tokens: int = 0, ranks: int = 1) -> None:
        """``tokens`` for each of ``ranks``, which share the documents; see ``open``."""
        self.ranks = ranks
        self._turn = 0  # never set back: ranks take turns over micro-batches of one document, too
        self.open(tokens)

    def open(self, tokens: int) -> None:
        """A new budget, of so many tokens for each rank."""
        self._budget = self.left = self.ranks * tokens

    def close(self) -> None:
        """Spend the rest of the budget: nothing is harvested until the next ``open``."""
        self.left = 0

    def shared_out(self, lengths: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
        """The documents of one forward pass that are harvested, and taken off the budget.

        One too long for what is left is passed over. One longer than a whole budget would be harvested in no step: where no
        document fits a budget that nothing was taken of, the first is cut.

        Args:
            lengths: of the documents, in tokens.

        Returns:
            Pairs (index of a document, rank that keeps it), and how many tokens of each are kept at most, from its end.
        """
        longest = max(lengths, default=0)
        picked: list[int] = []
        for i, n in enumerate(lengths):
            if sum(lengths[j] for j in picked) + n <= self.left:
                picked.append(i)
        if not picked and self.left == self._budget and min(longest, self.left) > 0:
            picked, longest = [0], self.left
        self.left -= sum(min(lengths[i], longest) for i in picked)
        turn, self._turn = self._turn, self._turn + len(picked)
        return [(i, (turn + n) % self.ranks) for n, i in enumerate(picked)], longest


def harvested(
    taps: Taps,
    documents: Documents,
    plan: HarvestPlan,
    policy_version: int = 0,
    shards: SequenceShards | None = None,
    rows: Rows | None = None,
) -> HiddenStates | None:
    """Pack what the last forward pass left of the documents that this rank keeps.

    Args:
        taps: on all layers of a decoder, behind one forward pass.
        documents: of that pass; see ``responses_at_the_end``.
        plan: that says which are kept.
        policy_version: version of the weights that ran.
        shards: if the decoder saw a part of each row only (collective then).
        rows: takes a layer's output apart; left out for a padded [B, T, H] or a packed [1, N, H] one.

    Returns:
        The packed documents on the CPU, or None when there is none for this rank.

    Raises:
        RuntimeError: if no forward pass was captured, or its shape does not fit the documents.
    """
    began = time.perf_counter()
    (ids, masks), states = documents, list(taps.states().values())
    taps.forget()
    lengths = [len(document) for document in ids]
    shared, cut = plan.shared_out(lengths)
    if shards is not None and shared:
        states = [shards.whole(s) for s in states]
    rank = 0 if shards is None else shards.rank
    if not (mine := [document for document, owner in shared if owner == rank]):
        return None
    rows = rows or (lambda state: rows_of(state, lengths))
    *aux, last = [torch.cat([part[i][-cut:] for i in mine]) for part in map(rows, states)]
    return HiddenStates(
        input_ids=torch.cat([ids[i][-cut:] for i in mine]).cpu(),
        aux=torch.cat([last[:, :0], *aux], dim=-1).cpu(),
        last=last.cpu(),
        loss_mask=torch.cat([masks[i][-cut:] for i in mine]).bool().cpu(),
        lengths=tuple(min(lengths[i], cut) for i in mine),
        policy_version=policy_version,
        milliseconds=(time.perf_counter() - began) * 1e3,
    )


def rows_of(state: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Each document's rows, [n_i, H], of a padded [B, T, H] or a packed [1, N, H] tensor.

    Raises:
        RuntimeError: if its shape does not fit the documents.
    """
    if state.shape[0] == len(lengths) and state.shape[1] >= max(lengths):
        return [row[:n] for row, n in zip(state, lengths, strict=True)]
    if state.shape[0] != 1 or state.shape[1] < sum(lengths):
        raise RuntimeError(
            f"hidden states of shape {tuple(state.shape)} do not fit documents of lengths {list(lengths)}, neither padded "
            "[B, T, H] nor packed [1, N, H]: the adapter named other documents than this forward pass had"
        )
    return list(torch.split(state[0, : sum(lengths)], list(lengths)))


def padded_rows(starts: Sequence[int], lengths: Sequence[int]) -> Rows:
    """Takes apart what a layer gave of rows that are padded on both sides, [B, T, H].

    Args:
        starts: the column where each document begins.
        lengths: of the documents, in tokens.
    """

    def rows(state: Tensor) -> list[Tensor]:
        longest = max((start + n for start, n in zip(starts, lengths, strict=True)), default=0)
        if state.shape[0] != len(lengths) or state.shape[1] < longest:
            raise RuntimeError(
                f"hidden states of shape {tuple(state.shape)} do not fit documents of lengths {list(lengths)} that begin in the "
                f"columns {list(starts)}: the adapter named other documents than this forward pass had"
            )
        return [row[start : start + n] for row, start, n in zip(state, starts, lengths, strict=True)]

    return rows


class RolloutHarvest:
    """What one actor process harvests of its log-prob passes: a budget of tokens for each, and law 6 around it.

    A backend says where its layers are (``taps``) and what is done with what they saw (``keep``).
    """

    def __init__(self, control: RolloutControl, ranks: int = 1, among: Any = None) -> None:
        """Nothing is captured before ``open``, and nothing at all where the method harvests nothing.

        Args:
            control: of this process.
            ranks: how many run the same documents together, and share them.
            among: those of them that exchange hidden states inside a pass; None for none.
        """
        self._control, self.session = control, control.session
        self.plan = HarvestPlan(ranks=ranks)
        self._among = among
        session = self.session
        self._wanted = session.method.harvest if session.config.train else None
        self._taps: Taps | None = None
        self._opened = False
        self._build()

    def taps(self, layers: Sequence[int]) -> Taps:
        """Hooks on those of these layers that this rank has."""
        raise NotImplementedError

    def keep(self, taps: Taps, documents: Documents, rows: Rows | None) -> HiddenStates | None:
        """After one forward pass: what of it is handed on at once (collective among ranks that exchange hidden states)."""
        raise NotImplementedError

    def deliver(self) -> None:
        """After a log-prob pass that did not fail: hand on what no forward pass could hand on by itself (collective)."""

    def _build(self) -> None:
        """Make the hooks where there are none: at the start, and at a fresh start after that had failed."""
        if self._wanted is not None and self._taps is None and not self.session.failed:
            with self.session.guarded(Work.HARVEST):
                self._taps = self.taps(self._wanted)

    def open(self) -> None:
        """Allow ``harvest_tokens`` tokens from here on; none if no draft is trained, or none is to be (collective).

        The first time more of them, as far as the draft's buffer holds them: a draft trains longest in a run's first step, and on
        nothing else.
        """
        self._build()
        self._control.agree()
        wanted = self._taps is not None and not self.session.failed and not self.session.hidden
        usual = self.session.config.harvest_tokens
        self.plan.open((usual if self._opened else max(usual, self._held_at_most())) if wanted else 0)
        self._opened = self._opened or wanted

    def _held_at_most(self) -> int:
        """Tokens that fit into the draft's buffer, and into memory on their way there: no more than in ``_FIRST`` usual steps."""
        config, draft, target = self.session.config, self.session.method.draft, self.session.target
        if draft is None or self._wanted is None:
            return 0
        number: int = max(getattr(torch, dtype).itemsize for dtype in (target.dtype, target.actor_dtype))
        token: int = (len(self._wanted) + 1) * draft.config.hidden_size * number
        return min(_FIRST * config.harvest_tokens, config.buffer_tokens, (config.buffer_mb << 20) // token)

    def close(self) -> None:
        """End the budget of this log-prob pass: nothing is captured until the next ``open``."""
        self.plan.close()

    @contextmanager
    def capture(self, documents: Callable[[], Documents], rows: Rows | None = None) -> Iterator[None]:
        """Capture the forward pass inside the block and hand it to the session, while there is budget.

        Where ranks share their documents each of them goes on to the end of the budget, whatever fails on one of them.

        Args:
            documents: called behind the pass.
            rows: takes a layer's output apart, see ``harvested``.
        """
        session, taps = self.session, self._taps
        if taps is None or self.plan.left <= 0 or (session.failed and self.plan.ranks == 1):
            yield
            return
        try:
            with ExitStack() as attached:
                with session.guarded(Work.HARVEST):
                    attached.enter_context(taps.attached())
                yield
            hidden = None
            with session.guarded(Work.HARVEST):
                with together("harvest the pass", self._among) if self._among is not None else nullcontext():
                    taps.states()  # behind this ranks that share rows exchange them: all of them, or none
                    found = documents()
                hidden = self.keep(taps, found, rows)
        finally:
            taps.forget()  # whatever has failed
        if hidden is not None:
            session.target_forward(hidden)


class DecoderHarvest(RolloutHarvest):
    """Harvest of a process that runs all layers, on whole rows or on its slices of packed ones."""

    def __init__(
        self, control: RolloutControl, decoder: Callable[[], Decoder], shards: SequenceShards | None = None
    ) -> None:
        """Bind to a policy.

        Args:
            control: of this process.
            decoder: see ``find_decoder``; not asked for where nothing is harvested.
            shards: if the decoder sees a part of each row only.
        """
        self._decoder, self._shards = decoder, shards
        super().__init__(control, *((1, None) if shards is None else (shards.size, shards.group)))

    def taps(self, layers: Sequence[int]) -> Taps:
        """Hooks on the whole decoder, of which this process runs all layers."""
        return Taps.of(self._decoder(), layers)

    def keep(self, taps: Taps, documents: Documents, rows: Rows | None) -> HiddenStates | None:
        """The documents that ``plan`` gives this rank, packed; see ``harvested``."""
        return harvested(taps, documents, self.plan, self._control.policy_version, self._shards, rows)


def responses_at_the_end(documents: Sequence[Tensor], responses: Sequence[int]) -> list[Tensor]:
    """Masks of whole documents whose last tokens, so many each, are the response."""
    return [torch.arange(len(d)) >= len(d) - n for d, n in zip(documents, responses, strict=True)]


def response_at_the_end(length: int, response: Tensor) -> Tensor:
    """Mask of a whole document, [length] bool, from the mask of the response that ends it, [r]."""
    return torch.cat([torch.zeros(length - len(response), dtype=torch.bool), response.bool().cpu()])
