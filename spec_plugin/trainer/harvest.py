"""Harvest: copy hidden states out of a forward pass of the target that the trainer runs anyway."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from functools import partial
from itertools import compress
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from draft_training.card import host_memory
from spec_plugin.api.events import HiddenStates
from spec_plugin.api.ranks import most_of_any_rank, together
from spec_plugin.api.speculation import Reason
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.policy.online_training import TRAIN_TOKENS
from spec_plugin.trainer.decoder import Decoder
from spec_plugin.trainer.harvest_plan import HarvestPlan, Piece
from spec_plugin.trainer.taps import Taps

#: token ids of whole documents, [n_i], in the order of the batch, and masks of what the policy sampled of them, [n_i] bool
Documents = tuple[Sequence[Tensor], Sequence[Tensor]]
#: each document's rows, [n_i, H], of what a layer was given or gave in one forward pass
Rows = Callable[[Tensor], Sequence[Tensor]]
#: the first step harvests as much as so many others, at most
_FIRST = 4


class Run(Protocol):
    """What a harvest asks of the run of its process, a ``SpecRun``."""

    session: SpecSession
    policy_version: int

    def agree(self) -> bool:
        """Make all ranks know whether the phase drafted, and stop speculating together (collective)."""


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


def cut_out(state: Tensor, pieces: Sequence[Piece], rows: Rows) -> Tensor:
    """[N, H]: a copy of the rows of some pieces, one after the other, of what a layer was given or gave."""
    # under inference mode, too, it must be usable in a backward pass
    with torch.inference_mode(False), torch.no_grad():
        found = rows(state)
        return torch.cat([found[piece.index][piece.start : piece.stop] for piece in pieces])


def harvested(
    taps: Taps,
    documents: Documents,
    plan: HarvestPlan,
    policy_version: int = 0,
    shards: PackedShards | None = None,
    rows: Rows | None = None,
    pieces: Sequence[Piece] | None = None,
) -> HiddenStates | None:
    """Pack what the last forward pass left of the documents that this rank keeps.

    Args:
        taps: on all layers of a decoder, behind one forward pass.
        documents: of that pass; see ``responses_at_the_end``.
        plan: that says which are kept.
        policy_version: version of the weights that ran.
        shards: if the decoder saw a part of each row only (collective then).
        rows: takes a layer's output apart; left out for a padded [B, T, H] or a packed [1, N, H] one.
        pieces: of ``plan``, which was asked before the pass; without shards the taps have cut them out already.

    Returns:
        The packed documents on the CPU, or None when there is none for this rank.

    Raises:
        RuntimeError: if no forward pass was captured, or its shape does not fit the documents.
    """
    began = time.perf_counter()
    (ids, masks), states = documents, list(taps.states().values())
    taps.forget()
    cut = pieces is not None and shards is None
    pieces = plan.pieces(masks) if pieces is None else pieces
    rank = 0 if shards is None else shards.rank
    if shards is not None and pieces:
        states = [shards.whole(s) for s in states]
    if not (mine := [piece for piece in pieces if piece.rank == rank]):
        return None
    if not cut:
        take = rows or partial(rows_of, lengths=[len(document) for document in ids])
        states = [cut_out(state, mine, take) for state in states]
    parts = [(ids[p.index][p.start : p.stop], masks[p.index][p.start : p.stop], p.start) for p in mine]
    return packed(parts, states, policy_version, began)


def packed(
    parts: Sequence[tuple[Tensor, Tensor, int]], states: Sequence[Tensor], policy_version: int, began: float
) -> HiddenStates | None:
    """Pieces of documents with their states, in the host's memory; None if there are none.

    A piece whose states are not finite is left out.

    Args:
        parts: of each piece its token ids [n_i], its mask of what the policy sampled [n_i], and its place in its document.
        states: [N, H] of all pieces, of the auxiliary layers, ascending, and of the final norm; nobody else has them.
        policy_version: version of the weights that ran.
        began: when the harvest began, by ``time.perf_counter``.
    """
    with torch.inference_mode(False), torch.no_grad():
        lengths = [len(ids) for ids, _, _ in parts]
        finite = torch.stack([torch.isfinite(state).all(-1) for state in states]).all(0)
        good = torch.stack([part.all() for part in torch.split(finite, lengths)]).tolist()
        if not all(good):
            keep = torch.cat([torch.full((n,), ok) for n, ok in zip(lengths, good, strict=True)]).to(finite.device)
            parts, states = list(compress(parts, good)), [state[keep] for state in states]
        if not parts:
            return None
        *aux, last = states
        return HiddenStates(
            input_ids=torch.cat([ids for ids, _, _ in parts]).cpu(),
            aux=_on_host(torch.cat([last[:, :0], *aux], dim=-1)),
            last=_on_host(last),
            loss_mask=torch.cat([mask for _, mask, _ in parts]).cpu().bool(),
            lengths=tuple(len(ids) for ids, _, _ in parts),
            policy_version=policy_version,
            milliseconds=(time.perf_counter() - began) * 1e3,
            offsets=tuple(start for _, _, start in parts),
            owned=True,
        )


def _on_host(state: Tensor) -> Tensor:
    return state if state.device.type == "cpu" else host_memory(state).copy_(state)


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

    def __init__(self, run: Run, ranks: int = 1, among: Any = None) -> None:
        """Nothing is captured before ``open``, and nothing at all where the method harvests nothing.

        Args:
            run: of this process.
            ranks: how many run the same documents together, and share them.
            among: those of them that exchange hidden states inside a pass; None for none.
        """
        self._run, self.session = run, run.session
        session = self.session
        window = session.config.train_tokens or TRAIN_TOKENS[session.target.device_type]
        self.plan = HarvestPlan(ranks=ranks, window=window)
        self._among = among
        self._wanted = session.method.harvest if session.config.train else None
        self._taps: Taps | None = None
        self._opened = False
        self.in_pass = False  # between ``open`` and ``close``, whether anything is harvested or not
        self._build()

    def taps(self, layers: Sequence[int]) -> Taps:
        """Hooks on those of these layers that this rank has."""
        raise NotImplementedError

    def keep(self, taps: Taps, documents: Documents, pieces: Sequence[Piece], rows: Rows | None) -> HiddenStates | None:
        """After one forward pass: what of it is handed on at once (collective among ranks that exchange hidden states)."""
        raise NotImplementedError

    def selection(
        self, documents: Documents, pieces: Sequence[Piece], rows: Rows | None
    ) -> Callable[[Tensor], Tensor] | None:
        """What a hook keeps of a layer's output; None: all of it, until ``keep``."""
        return None

    def deliver(self) -> None:
        """After a log-prob pass that did not fail: hand on what no forward pass could hand on by itself (collective)."""

    def _build(self) -> None:
        """Make the hooks where there are none: at the start, and at a fresh start after that had failed."""
        if self._wanted is not None and self._taps is None and not self.session.failed:
            with self.session.guarded(Reason.HARVEST):
                self._taps = self.taps(self._wanted)

    def open(self) -> None:
        """Allow ``harvest_tokens`` tokens from here on; none if no draft is trained, or none is to be (collective).

        The first time more of them, as far as the draft's buffer holds them: a draft trains longest in a run's first step, and on
        nothing else.
        """
        self._build()
        self.in_pass = True
        self._run.agree()
        wanted = self._taps is not None and not self.session.failed and not self.session.idle
        usual = self.session.config.harvest_tokens
        before = int(most_of_any_rank(float(self.plan.passed)))
        self.plan.open((usual if self._opened else max(usual, self._held_at_most())) if wanted else 0, before or None)
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
        self.in_pass = False

    @contextmanager
    def capture(self, documents: Callable[[], Documents], rows: Rows | None = None) -> Iterator[None]:
        """Capture the forward pass inside the block and hand it to the session, while there is budget.

        Where ranks share their documents each of them goes on to the end of the budget, whatever fails on one of them.

        Args:
            documents: of this pass.
            rows: takes a layer's output apart, see ``harvested``.
        """
        session, taps = self.session, self._taps
        if taps is None or not self.plan.active or (session.failed and self.plan.ranks == 1):
            yield
            return
        if self.plan.left <= 0:
            with session.guarded(Reason.HARVEST):
                self.plan.pieces(documents()[1])  # counts them
            yield
            return
        pieces: list[Piece] = []
        try:
            with ExitStack() as attached:
                trouble: Exception | None = None
                try:
                    found, ahead = documents(), copy(self.plan)
                    pieces = ahead.pieces(found[1])
                    select = self.selection(found, pieces, rows)
                except (
                    Exception
                ) as error:  # law 6; ranks that share these documents hear of it together, behind the pass
                    trouble = error
                if pieces:
                    with session.guarded(Reason.HARVEST):
                        attached.enter_context(taps.attached(select))
                yield
            hidden = None
            with session.guarded(Reason.HARVEST):
                with together("harvest the pass", self._among) if self._among is not None else nullcontext():
                    if trouble is not None:
                        raise trouble
                    if pieces:
                        taps.states()  # behind this ranks that share rows exchange them: all of them, or none
                self.plan = ahead  # on all of them, or on none
                if pieces:
                    hidden = self.keep(taps, found, pieces, rows)
        finally:
            taps.forget()  # whatever has failed
        if hidden is not None:
            session.target_forward(hidden)


class DecoderHarvest(RolloutHarvest):
    """Harvest of a process that runs all layers, on whole rows or on its slices of packed ones."""

    def __init__(self, run: Run, decoder: Callable[[], Decoder], shards: PackedShards | None = None) -> None:
        """Bind to a policy.

        Args:
            run: of this process.
            decoder: see ``find_decoder``; asked for by the harvest, and by the evidence of exact sampling.
            shards: if the decoder sees a part of each row only.
        """
        self._decoder, self._shards = decoder, shards
        super().__init__(run, *((1, None) if shards is None else (shards.size, shards.group)))

    @property
    def whole(self) -> bool:
        """Does the decoder see whole rows."""
        return self._shards is None

    @property
    def decoder(self) -> Decoder:
        """The policy's decoder layers, looked for at each call."""
        return self._decoder()

    def taps(self, layers: Sequence[int]) -> Taps:
        """Hooks on the whole decoder, of which this process runs all layers."""
        return Taps.of(self._decoder(), layers)

    def keep(self, taps: Taps, documents: Documents, pieces: Sequence[Piece], rows: Rows | None) -> HiddenStates | None:
        """The pieces that ``plan`` gives this rank, packed; see ``harvested``."""
        return harvested(taps, documents, self.plan, self._run.policy_version, self._shards, rows, pieces)

    def selection(
        self, documents: Documents, pieces: Sequence[Piece], rows: Rows | None
    ) -> Callable[[Tensor], Tensor] | None:
        """The rows of the pieces, unless ranks exchange their parts of them first."""
        if self._shards is not None:
            return None
        lengths = [len(document) for document in documents[0]]
        return lambda state: cut_out(state, pieces, rows or partial(rows_of, lengths=lengths))


def responses_at_the_end(documents: Sequence[Tensor], responses: Sequence[int]) -> list[Tensor]:
    """Masks of whole documents whose last tokens, so many each, are the response."""
    return [torch.arange(len(d)) >= len(d) - n for d, n in zip(documents, responses, strict=True)]


def response_at_the_end(length: int, response: Tensor) -> Tensor:
    """Mask of a whole document, [length] bool, from the mask of the response that ends it, [r]."""
    return torch.cat([torch.zeros(length - len(response), dtype=torch.bool), response.bool().cpu()])
