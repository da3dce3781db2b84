"""SpecRun: all that an adapter's actor process does for speculative rollouts, in one object that keeps the order of things."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_plugin.api.errors import WrongOrderError
from spec_plugin.api.events import UNKNOWN, ChosenStates, Drafts, LogprobBatch, StatedLogprobs, WeightSync, disputed
from spec_plugin.api.ranks import is_first
from spec_plugin.api.spans import Spans
from spec_plugin.api.speculation import Reason
from spec_plugin.api.witness import Witness, witnessed
from spec_plugin.lifecycle.blocking import run_blocking
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.trainer.decoder import Decoder
from spec_plugin.trainer.evidence import EvidenceTap
from spec_plugin.trainer.harvest import DecoderHarvest, Documents, PackedShards, RolloutHarvest, Rows
from spec_plugin.trainer.links import EngineLink
from spec_plugin.trainer.rank_engines import RanksLink
from spec_plugin.trainer.rollout_control import RolloutControl


@dataclass(frozen=True)
class Responses:
    """What a trainer holds of B responses when their log-probs are about to enter the loss, padded to the longest."""

    documents: Sequence[Tensor]  # token ids of each whole sequence, [n_i] int64
    starts: Sequence[int]  # where the first column of the [B, T] tensors lies in each document
    mask: Tensor  # [B, T] bool, True where the policy sampled the token
    rollout: (
        Tensor | None
    )  # [B, T] float, log-probs by the engine while sampling; None: the trainer did not ask for them
    #: [B] int64 each: policy versions that sampled each first and last token, -1 unknown, where the trainer keeps them beside
    #: its responses; None: the engines alone say it
    told: tuple[Tensor, Tensor] | None = None
    #: [B] bool: rows from which the trainer has cut tokens on purpose, so that no request need be whole in them; None: from none
    cut: Tensor | None = None

    def versions(self, said: Tensor, now: int, lags: bool) -> Tensor:
        """Of each token the policy version, [B, T], as ``LogprobBatch`` has it: what the trainer was told and what engines said.

        Args:
            said: [B, T] by the engines, -1 unknown.
            now: version that recomputes.
            lags: may a sequence be of several versions: then engines know better which token is of which.
        """
        if self.told is None:
            return said
        first, last = (version.to(said.device)[:, None] for version in self.told)
        number, count = self.mask.cumsum(-1), self.mask.sum(-1, keepdim=True)  # which sampled token of how many
        begun = torch.where((count == 1) & (last > now), last, first)  # a single token is both ends
        told = torch.where(first == last, first, UNKNOWN).expand_as(said)
        told = told.where(number != count, last).where(number != 1, begun)
        told = told.where(last >= first, disputed(first))  # versions never fall
        if not lags:
            return told.where(told != UNKNOWN, said)
        between = (first < 0) | ((first <= said) & (said <= last))
        return told.where((said < 0) | (last > now), said.where(between, disputed(said)))


class SpecRun:
    """Speculative rollouts in one process of the trainer's actor; on every rank, though only the first one has a link.

    A step of a synchronous trainer, with ``run_blocking`` around what is a coroutine::

        run.weights_synced(version, embed, head)      the engines have the new weights: refresh the draft, begin the rollouts
        ...                                           the engines sample, see ``EngineFront.sample``
        with run.logprob_pass(documents): ...         the trainer's own pass: the rollouts have ended, hidden states are harvested
        run.check(responses, recomputed)              before the loss gets any log-prob
        ...                                           the trainer's own update
        run.policy_updated(step)                      a slice of draft training
        run.metrics()                                 for the step's log

    A wrong order is an error of the adapter's, and raises ``WrongOrderError``. Draft trouble raises nothing (law 6);
    ``LosslessError`` and ``LogprobProvenanceError`` stop the run (laws 2 and 3): never catch them.
    """

    def __init__(
        self,
        session: SpecSession,
        link: EngineLink | None,
        decoder: Callable[[], Decoder] | None = None,
        *,
        shards: PackedShards | None = None,
        harvest: Callable[[RolloutControl], RolloutHarvest] | None = None,
        sleeps: bool = False,
        overlaps: bool = False,
    ) -> None:
        """Bind session, engines and policy; nothing is called before the first weight sync.

        Args:
            session: of this process.
            link: all engines of the run, on the first actor rank; None on the others, which train the same draft. A
                ``RanksLink`` on every rank.
            decoder: finds the policy's decoder, see ``find_decoder``; asked for where the method harvests, or there is evidence.
            shards: if the decoder sees a part of each row only.
            harvest: makes the harvest of a backend that needs one of its own, in the place of ``decoder`` and ``shards``.
            sleeps: have the engines no weights in memory when the log-prob pass begins.
            overlaps: do the engines generate while the trainer trains; rollouts then end with the next weight sync.
        """
        self.session = session
        self._ranks = link if isinstance(link, RanksLink) else None
        keep = None
        if self._ranks is not None and not is_first():
            link, keep = None, self._ranks.keep
        self.control = RolloutControl(session, link, sleeps, overlaps, keep)
        if harvest is not None:
            self.harvest = harvest(self.control)
        else:
            assert decoder is not None, "either decoder or harvest"
            self.harvest = DecoderHarvest(self.control, decoder, shards)
        self._evidence = EvidenceTap(self.harvest, session)
        self._in_pass = self._synced = False
        self._checked = False  # log-probs of the step in progress
        #: what the engines have said of what they sampled; they are asked once a step, in a synchronous run once a phase
        self._spans: Spans | None = None
        self._ahead = 0  # steps trained since the last weight sync

    def _serving(self) -> AbstractContextManager[None]:
        """Around what may call engines that live in the ranks' own processes."""
        return nullcontext() if self._ranks is None else self._ranks.serving()

    # ---- weight sync and rollouts

    @property
    def link(self) -> EngineLink | None:
        """All engines of the run, on the first actor rank."""
        return self.control.link

    @property
    def policy_version(self) -> int:
        """Of the weights that the engines roll out with; -1 before the first weight sync."""
        return self.control.policy_version

    async def weights_synced(
        self,
        version: int,
        embed: Tensor | None,
        head: Tensor | None,
        *,
        copied: bool = False,
        rollouts_begin: bool = True,
    ) -> None:
        """The engines have the target's weights of this version, all of them: refresh the draft, begin the rollouts (collective).

        Args:
            version: policy version.
            embed: the policy's input embedding, [vocab, hidden], as it was sent.
            head: and its LM head; the same tensor where the two are tied.
            copied: are these copies that nobody writes into any more; others are copied here, in the engine's dtype.
            rollouts_begin: may the engines generate now; else ``rollouts_begin`` says when.

        Raises:
            LosslessError: if an engine does not sample from the target.
            WrongOrderError: if a log-prob pass is under way.
        """
        self._refuse(self._in_pass, "weights_synced", "inside logprob_pass; sync weights before or behind it")
        if not copied:
            embed, head = (None if t is None else self.session.copy_of(t) for t in (embed, head))
        self._ahead, self._spans, self._synced = 0, None, True
        self._evidence.begin(version)
        with self._serving():
            await self.control.synced(WeightSync(version, embed, head))
            if rollouts_begin:
                await self.rollouts_begin()

    async def rollouts_begin(self) -> None:
        """Generation may begin: self-test where it is due, then the number of tokens to draft.

        Raises:
            LosslessError: if an engine does not sample from the target.
            WrongOrderError: if no weight sync came before.
        """
        self._refuse(not self._synced, "rollouts_begin", "before the first weights_synced, which it stands on")
        self._spans = self._spans if self.control.lags else None  # of a generation before this one
        with self._serving():
            await self.control.begin()

    async def rollouts_end(self) -> None:
        """The trainer has rollouts. Collect what the engines did, once, and not where rollouts overlap with training."""
        self.session.ledger.works()
        with self._serving():
            await self.control.finish()

    # ---- the log-prob pass

    @contextmanager
    def logprob_pass(self, documents: Callable[[], Documents] | None = None) -> Iterator[None]:
        """Around the trainer's log-prob pass: the rollouts have ended; hidden states are harvested on the way (collective).

        Args:
            documents: of the pass, if it is one forward pass; else each is to be in ``micro_batch``.

        Raises:
            WrongOrderError: if a log-prob pass is under way.
        """
        self._refuse(self._in_pass, "logprob_pass", "inside another one")
        run_blocking(self.rollouts_end())
        self.harvest.open()
        self._in_pass = True
        try:
            with nullcontext() if documents is None else self.micro_batch(documents):
                yield
        finally:
            self._in_pass = False
            self.harvest.close()
        self.harvest.deliver()

    @contextmanager
    def micro_batch(self, documents: Callable[[], Documents], rows: Rows | None = None) -> Iterator[None]:
        """Around one forward pass of the trainer's log-prob pass.

        Args:
            documents: token ids and masks of what the policy sampled, of this pass.
            rows: takes a layer's output apart, [n_i, H] of each document; left out for [B, T, H] or packed [1, N, H].
        """
        found: Callable[[], Documents] = cache(documents)  # both ask
        moved = self._ahead or self.control.lags
        with (
            nullcontext() if moved else self._evidence.capture(found, rows),
            self.harvest.capture(found, rows),
        ):
            yield

    def spending(self) -> AbstractContextManager[None]:
        """Around what the trainer's process does for our sake alone: it counts as what drafts cost."""
        return self.session.ledger.spending()

    # ---- log-probs, before they enter the loss

    def check(
        self,
        responses: Responses,
        recomputed: Tensor,
        *,
        rollout_in_loss: bool = False,
        current_weights: bool = False,
        chosen_from: int | None = None,
    ) -> None:
        """Log-probs are about to enter the loss: are they the target's (law 3; collective).

        Args:
            responses: B of them.
            recomputed: [B, T] float, by the actor, teacher-forced.
            rollout_in_loss: do the engine's log-probs enter the loss.
            current_weights: were they recomputed by the weights as they are now, and not by those of the last weight sync.
            chosen_from: where only some sequences of a step are recomputed, from how many they were chosen.

        Raises:
            LogprobProvenanceError: naming the first sequences, positions and values. Let it stop the run.
            WrongOrderError: if the rollouts have not ended.
        """
        control = self.control
        self._refuse(control.running, "check", "while the rollouts run; call rollouts_end before")
        self.session.ledger.works()
        who = self._who_sampled(responses)
        kept = self._witnesses() if responses.rollout is None else []
        if not len(responses.mask):  # of a rank that got none
            self._checked = True
            return
        batch = LogprobBatch(
            policy_version=control.policy_version,
            recomputed=recomputed,
            rollout=responses.rollout,
            mask=responses.mask,
            rollout_in_loss=rollout_in_loss,
            lag_allowed=control.lags,
            ahead=self._ahead if current_weights else 0,
            states=self._states_of(responses),
            no_states=self._evidence.none_for(control.lags, responses.rollout is not None),
            **who,
        )
        self.session.check_logprobs(batch, chosen_from)
        if kept and (known := self._kept_aside(batch, responses, kept)) is not None:
            self.session.check_logprobs(known)
        self._checked = True

    def check_stated(self, responses: Responses) -> None:
        """The same of log-probs that enter the loss as the engine stated them, and that nobody recomputes (collective).

        Raises:
            LogprobProvenanceError: naming the first sequences, positions and values. Let it stop the run.
        """
        self.session.ledger.works()
        if responses.rollout is None:
            return
        who = self._who_sampled(responses)
        stated = StatedLogprobs(
            self.policy_version, responses.rollout, responses.mask, lag_allowed=self.control.lags, **who
        )
        self.session.check_stated(stated)
        self._checked = True

    def undrafted(self, responses: Responses) -> Tensor:
        """Which tokens are known to have been sampled without drafts, [B, T] bool (collective)."""
        drafted: Tensor = self._who_sampled(responses)["drafted"]
        return (drafted != Drafts.ON) & responses.mask

    def _who_sampled(self, responses: Responses) -> dict[str, Any]:
        """Of each token what engines have said: ``versions``, ``drafted``, ``sampled`` and ``apart`` of a batch."""
        if self._spans is None:
            with self._serving():
                self._spans = self.control.spans(responses.told is not None)
        now, mask, told, lags = self.policy_version, responses.mask, responses.told, self.control.lags
        said, plain = torch.full(mask.shape, UNKNOWN), torch.zeros(mask.shape, dtype=torch.bool)
        exact: dict[str, Tensor] = {}
        if told is None and not lags:  # what this phase has sampled is not taken for older text
            told = (torch.full((len(mask),), now),) * 2
        # log-probs are judged without it, too
        with self.session.guarded(Reason.ENGINES, "what the engines say of their samples"):
            found = self._spans.of(responses.documents, responses.starts, mask, told, responses.rollout)
            said, plain, exact["apart"] = found.versions, found.plain, found.apart
            if self._spans.complete and not lags:  # a document that lags may have begun before this run
                cut = torch.zeros(len(mask), dtype=torch.bool) if responses.cut is None else responses.cut.cpu()
                exact["sampled"] = (found.sampled | cut[:, None]).to(mask.device)
        if now < 0:  # the engines know theirs, and the actor has not heard of it: nothing can be compared
            said.fill_(UNKNOWN)
        plain = plain.to(mask.device)
        drafts = bool((mask & ~plain).any()) if lags else self.control.speculating  # of the phases that sampled it
        drafted = torch.where(plain & drafts, Drafts.CONTROL, Drafts.ON if drafts else Drafts.OFF).to(torch.uint8)
        return {"versions": responses.versions(said.to(mask.device), now, lags), "drafted": drafted, **exact}

    def _states_of(self, responses: Responses) -> ChosenStates | None:
        """Of the tokens that are evidence of exact sampling, if the engine's log-probs came along."""
        known = responses.rollout is not None and not self._ahead
        return self._evidence.of(responses.documents, responses.starts) if known else None

    def _witnesses(self) -> list[Witness]:
        with self._serving():
            return self.control.witnesses()

    def _kept_aside(self, batch: LogprobBatch, responses: Responses, kept: Sequence[Witness]) -> LogprobBatch | None:
        """What the engines kept aside of log-probs that the trainer did not ask for, of this rank's sequences."""
        known: LogprobBatch | None = None
        with self.session.guarded(Reason.ENGINES, "log-probs that the engines kept"):
            known = witnessed(batch, responses.documents, responses.starts, kept)
        return known

    # ---- behind the update, and what a run leaves behind

    def policy_updated(self, step: int) -> None:
        """The trainer's own update of the step is done: one slice of draft training, bounded by ``train_share`` (collective).

        Raises:
            WrongOrderError: if no log-prob of this step was checked: an unchecked one has entered the loss (law 3).
        """
        self._refuse(
            not self._checked, "policy_updated", "without check or check_stated in this step, before the update"
        )
        self._checked = False
        self._spans = None if self.control.lags else self._spans  # else the engines have said all of this phase
        self._ahead += 1
        self.control.train_draft(step)

    def metrics(self) -> Mapping[str, float]:
        """``spec/…`` of this step, on the rank that knows the engines; empty on the others."""
        return {} if self.link is None else self.session.metrics()

    def save(self, path: Path) -> None:
        """Save the plugins' state under ``path``; by the first rank alone."""
        self.session.save(path)

    def load(self, path: Path) -> None:
        """Restore it, on every rank; takes effect at the coming weight sync."""
        self.session.load(path)

    def _refuse(self, wrong: bool, what: str, why: str) -> None:
        if wrong:
            raise WrongOrderError(f"SpecRun.{what} was called {why}")
