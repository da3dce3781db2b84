"""SpecRun: all that an adapter calls in the trainer's actor; it keeps the order of a step, and the ranks together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from spec_plugin.api.errors import WrongOrderError
from spec_plugin.api.events import DraftRefresh, Drafts, EngineSchedule, LogprobBatch, StatedLogprobs, WeightSync
from spec_plugin.api.ranks import RanksPartedError, is_first, most_of_any_rank, of_first, on_any_rank
from spec_plugin.api.spans import FORGOTTEN, Span, Spans
from spec_plugin.api.speculation import Reason
from spec_plugin.lifecycle.blocking import run_blocking
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.trainer.engine_control import EngineControl
from spec_plugin.trainer.evidence import EvidenceTap
from spec_plugin.trainer.harvest import Documents, RolloutHarvest, Rows
from spec_plugin.trainer.judged import share_for
from spec_plugin.trainer.links import EngineLink
from spec_plugin.trainer.log_probs import Responses, who_sampled, with_kept_log_probs
from spec_plugin.trainer.rank_engines import RanksLink
from spec_plugin.trainer.slice_budget import SliceBudget

logger = logging.getLogger(__name__)


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
        harvest: Callable[[SpecRun], RolloutHarvest],
        *,
        sleeps: bool = False,
        overlaps: bool = False,
    ) -> None:
        """Bind session, engines and policy; nothing is called before the first weight sync.

        Args:
            session: of this process.
            link: all engines of the run, on the first actor rank; None on the others, which train the same draft. A
                ``RanksLink`` on every rank.
            harvest: makes what captures the hidden states of this rank's log-prob passes: ``DecoderHarvest``, or a backend's own.
            sleeps: have the engines no weights in memory when the log-prob pass begins.
            overlaps: do the engines generate while the trainer trains; rollouts then end with the next weight sync.
        """
        self.session, self._overlaps = session, overlaps
        session.ledger.overlaps = overlaps
        self._ranks = link if isinstance(link, RanksLink) else None
        self.link = link if self._ranks is None or is_first() else None  # all engines of the run, on the first rank
        self._slices = SliceBudget()
        self.engines = None if self.link is None else EngineControl(session, self.link, sleeps or overlaps)
        self.policy_version = -1  # of the weights that the engines roll out with; -1 before the first weight sync
        self.lags = overlaps  # may sequences be older than the policy that recomputes them; the same on all ranks
        self._in_pass = self._synced = False
        self._checked = False  # log-probs of the step in progress
        self._ahead = 0  # steps trained since the last weight sync
        #: what the engines have said of what they sampled; they are asked once a step, in a synchronous run once a phase
        self._spans, self._asked = Spans(), False
        self._with_log_probs: list[Span] = []  # since the last weight sync, on the first rank
        self.harvest = harvest(self)
        self._evidence = EvidenceTap(self.harvest, session)

    def _serving(self) -> AbstractContextManager[None]:
        """Around what may call engines that live in the ranks' own processes."""
        return nullcontext() if self._ranks is None else self._ranks.serving()

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
        self._ahead, self._synced = 0, True
        self._asked, self._with_log_probs = False, []
        self._evidence.begin(version)
        with self._serving():
            if self._overlaps:
                await self._end_phase()
            self.policy_version = version
            if self.engines is not None:
                await self.engines.audit("synced")
            await self._refresh(WeightSync(version, embed, head))
            if rollouts_begin:
                await self.rollouts_begin()

    async def _refresh(self, event: WeightSync) -> None:
        """Send the draft for these weights; where speculation had failed and may be tried again, begin anew (collective)."""
        session, failed = self.session, self.session.failed
        session.try_again()
        begins_anew = self.agree(failed)
        if begins_anew:
            session.recover()
        with session.ledger.spending():
            refresh: DraftRefresh | None = session.weight_sync(event)
            if begins_anew:
                # a plain phase, on which all ranks harvest and train again; what is sent and tested is sent behind the next
                # sync, for which all replicas were waited
                return
            fresh_start, session.recovering = session.recovering, False
            if self.engines is not None:
                await self.engines.install(refresh, fresh_start)
            elif self._ranks is not None:
                self._ranks.on_local_draft(event.policy_version, refresh)

    async def rollouts_begin(self) -> None:
        """Generation may begin: self-test where it is due, then the number of tokens to draft.

        Raises:
            LosslessError: if an engine does not sample from the target.
            WrongOrderError: if no weight sync came before.
        """
        self._refuse(not self._synced, "rollouts_begin", "before the first weights_synced, which it stands on")
        self._asked = self._asked and self.lags  # else that was of a generation before this one
        session, control_share = self.session, None
        if self.lags and not session.target.truncated:
            # older text is measured by the plain text of its own step, of which each must have enough
            control_share = share_for(session.config.control_share, session.judged_together)
        with self._serving():
            if self.engines is None:
                session.rollout_start(self.policy_version)
            else:
                await self.engines.begin(self.policy_version, control_share)
                session.ledger.waits()

    async def rollouts_end(self) -> None:
        """The trainer has rollouts. Collect what the engines did, once, and not where rollouts overlap with training."""
        self.session.ledger.works()
        with self._serving():
            if not self._overlaps:
                await self._end_phase()

    async def _end_phase(self) -> None:
        if self.engines is not None:
            self.lags = await self.engines.end_phase() or self.lags

    def agree(self, failed_before: bool = False) -> bool:
        """Make all ranks know whether the phase drafted, and stop speculating together (collective).

        Args:
            failed_before: had speculation failed on this rank a moment ago.

        Returns:
            Whether it had on any rank, and has failed on none now: all begin anew, or none.
        """
        session, first, was_hidden = self.session, self.engines is not None, self.session.hidden
        hidden = first and session.ledger.hidden and session.config.serve == "auto"
        own = first and session.speculating, self.lags, session.failed and not session.follows, failed_before
        try:
            found = on_any_rank(*own, hidden, first and session.no_outlook)
        except RanksPartedError as error:
            session.fail(Reason.OTHER_TROUBLE, error, for_good=True, doing="the ranks' agreement")
            return False
        drafted, self.lags, failed, failed_before, session.hidden, session.hopeless = found
        if first and hidden is not was_hidden:
            logger.info(
                "spec-plugin: policy version %d: the trainer %s",
                self.policy_version,
                "does not wait for rollouts, so drafts would save nothing: none are served or trained until it does"
                if hidden
                else "waits for rollouts again: drafts go on",
            )
        if not first:  # which table it is nobody has told this rank
            session.engines = EngineSchedule(None if drafted else session.plain_schedule)
        session.follow("another rank: its own warning says why" if failed else None)
        return failed_before and not failed

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
        moved = self._ahead or self.lags
        with (
            nullcontext() if moved else self._evidence.capture(found, rows),
            self.harvest.capture(found, rows),
        ):
            yield

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
        running = self.engines is not None and self.engines.running is not None
        self._refuse(running and not self._overlaps, "check", "while the rollouts run; call rollouts_end before")
        self.session.ledger.works()
        who = self._who_sampled(responses)
        if not len(responses.mask):  # of a rank that got none
            self._checked = True
            return
        stated = responses.rollout is not None
        states = self._evidence.of(responses.documents, responses.starts) if stated and not self._ahead else None
        batch = LogprobBatch(
            policy_version=self.policy_version,
            recomputed=recomputed,
            rollout=responses.rollout,
            mask=responses.mask,
            rollout_in_loss=rollout_in_loss,
            lag_allowed=self.lags,
            ahead=self._ahead if current_weights else 0,
            states=states,
            no_states=self._evidence.none_for(self.lags, stated),
            **who,
        )
        self.session.check_logprobs(batch, chosen_from)
        if not stated and self._with_log_probs:
            known: LogprobBatch | None = None
            with self.session.guarded(Reason.ENGINES, "log-probs that the engines kept"):
                known = with_kept_log_probs(batch, responses, self._with_log_probs)
            if known is not None:
                self.session.check_logprobs(known)
        self._checked = True

    def check_stated(self, responses: Responses) -> None:
        """Check log-probs that enter the loss as the engine stated them, and that nobody recomputes (law 3; collective).

        Raises:
            LogprobProvenanceError: naming the first sequences, positions and values. Let it stop the run.
        """
        self.session.ledger.works()
        if responses.rollout is None:
            return
        who = self._who_sampled(responses)
        self.session.check_stated(
            StatedLogprobs(self.policy_version, responses.rollout, responses.mask, lag_allowed=self.lags, **who)
        )
        self._checked = True

    def undrafted(self, responses: Responses) -> Tensor:
        """Which tokens are known to have been sampled without drafts, [B, T] bool (collective)."""
        drafted: Tensor = self._who_sampled(responses)["drafted"]
        return (drafted != Drafts.ON) & responses.mask

    def _who_sampled(self, responses: Responses) -> dict[str, Any]:
        spans = self._engine_spans(responses)
        return who_sampled(self.session, responses, spans, self.policy_version, self.lags)

    def _engine_spans(self, responses: Responses) -> Spans:
        """What the engines have said of the text that they sampled; they are asked where that is due (collective)."""
        if self._asked:
            return self._spans
        # of this phase alone where the trainer knows, in a synchronous run, by which version its text was sampled
        session, of_the_run = self.session, self.lags or responses.told is None
        # behind a failure, in a phase without drafts, nobody needs it, and nobody waits for it
        needed = of_the_run or responses.rollout is None or session.speculating or not session.failed
        self._asked, found = True, [FORGOTTEN]
        with self._serving():
            if self.engines is not None and needed:
                found = run_blocking(self.engines.spans())
            self._with_log_probs += [span for span in found if span.log_probs is not None]
            self._spans = self._spans if of_the_run else Spans()
            self._spans.complete = False
            with session.guarded(Reason.ENGINES, "what the engines say of their samples"):
                # other ranks need no log-probs: the first one finds its own documents among so many
                found = of_first([span if span.log_probs is None else replace(span, log_probs=None) for span in found])
                self._spans.add(found, self.policy_version)
        return self._spans

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
        self._asked = self._asked and not self.lags  # else the engines have said all of this phase
        self._ahead += 1
        session, seconds = self.session, 0.0
        wanted = 0.0 if session.idle else session.head_start()
        self.agree()  # behind it: who failed there takes no part in the slice
        with session.guarded(Reason.TRAINING, "head start"):
            # what plain generation takes is known where the link to the engines is
            earned = self._slices.seconds(most_of_any_rank(session.ledger.plain_s))
            seconds = session.config.train_share * earned + most_of_any_rank(wanted)
        with session.ledger.spending():
            if not session.idle:
                session.train_draft(step, seconds)
        session.ledger.close()
        session.ledger.waits()

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
