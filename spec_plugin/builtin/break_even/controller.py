"""Break-even control: how many tokens to draft at each batch size, from what the engine's own steps take (law 7)."""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from spec_plugin.builtin.break_even import plan
from spec_plugin.builtin.break_even.cost import CostModel, conditional_acceptance, constant_acceptance, tokens_per_step
from spec_plugin.builtin.break_even.experts import Experts
from spec_plugin.builtin.break_even.plan import Plan
from spec_plugin.config import SpecConfig
from spec_plugin.errors import SpecConfigError
from spec_plugin.events import (
    DraftRefresh,
    RefreshReport,
    RolloutStats,
    Schedule,
    SelfTestReport,
    StepTiming,
    TargetInfo,
)
from spec_plugin.hookspecs import hookimpl
from spec_plugin.method import KNOWS_NOTHING, Method
from spec_plugin.speculation import Reason, Speculation, as_metrics, sizes_shown

logger = logging.getLogger(__name__)

#: Verification steps below which a rollout phase says nothing about acceptance.
_MIN_DRAFTS = 64
#: Engine and training disagree about acceptance beyond this ratio of the gain only when they are misaligned.
_MISALIGNED = 0.5
#: A draft that is not served is tried in one phase in so many; the engine's cut-off ends the try when it fails.
_TRY_EVERY = 8
#: most tokens drafted in such a try: enough to see whether the draft is any good
_TRY_K = 3
#: Whole phases that generate fewer tokens per second than plain ones did, by this factor and so often in a row, are suspect.
_BRAKE_BELOW, _BRAKE_AFTER = 0.97, 2
#: predicted speed-up from which a run may go on without ever having seen a plain phase
_SURE = 1.3
#: Phases without drafts after that; doubled each time it happens again.
_BRAKE_PHASES = 8
#: What the newest plain phase weighs in the plain tokens per second.
_NEWEST = 0.5
#: tokens of a verification step below which a draft is dropped in a try while the timings contradict each other
_BREAK_EVEN_UNKNOWN = 1.5
#: chance of each token of a draft that has learnt for a step or two, and steps within which its head start must pay back
_HOPED_CHANCE, _PAYS_BACK_WITHIN = 0.7, 3
#: bytes that the sampler may take on a card, outside of what vLLM has counted
_SAMPLER_ROOM = 2 << 30


class Brake:
    """The check that does not rely on the cost model: tokens per second of whole phases, with drafts and without.

    The last plain phase may be long ago, and its responses shorter or its batches fuller. So phases with drafts that are
    slower than it was raise a suspicion only; the next phase is plain and decides.
    """

    def __init__(self) -> None:
        self._plain: float | None = None  # tokens per second
        self._slower: list[float] = []  # the same of the suspect phases
        self._pause = _BRAKE_PHASES
        self.left = 0  # phases without drafts still to come

    @property
    def on(self) -> bool:
        """True while the brake, or the comparison before it, keeps every batch size at k = 0."""
        return self.left > 0 or self._suspicious

    @property
    def reason(self) -> Reason:
        """Why ``on``: slower whole rollouts, or one plain rollout to compare with; meaningless while it is off."""
        return Reason.ROLLOUTS_SLOWER if self.left > 0 else Reason.COMPARISON

    @property
    def compares(self) -> bool:
        """True once a plain phase was timed, which phases with drafts are compared with."""
        return self._plain is not None

    @property
    def _suspicious(self) -> bool:
        return len(self._slower) >= _BRAKE_AFTER

    def rolled_out(self, rate: float, drafted: bool) -> bool:
        """Count a phase.

        Args:
            rate: tokens per second, of the whole phase.
            drafted: did the engines draft in it.

        Returns:
            True if this phase pulls the brake.
        """
        if self.left > 0:
            self.left -= 1
        if not (math.isfinite(rate) and rate > 0):
            return False
        if drafted:
            slower = self._plain is not None and rate < _BRAKE_BELOW * self._plain
            self._slower = [*self._slower, rate] if slower else []
            return False
        if not self._suspicious:
            self._plain = rate if self._plain is None else _NEWEST * rate + (1 - _NEWEST) * self._plain
            return False
        guilty = statistics.fmean(self._slower) < _BRAKE_BELOW * rate
        self._plain, self._slower = rate, []
        if guilty:
            self.left, self._pause = self._pause, 2 * self._pause
        return guilty


class BreakEvenController:
    """Chooses k for each batch size before each rollout phase; as a batch drains, the engine moves through the table.

    While speculation is on, the acceptance is the engine's own. While it is off, it is what draft training predicts,
    corrected by how far prediction and engine were apart when last compared, and now and then it is tried to compare them
    again. A draft that does not pay is dropped within the phase, see ``spec_plugin.engine.schedule.cutoff``.
    """

    def __init__(self) -> None:
        self._config = SpecConfig.parse({})
        self._fixed = False
        self.cost = CostModel()
        self._calibration: tuple[StepTiming, ...] = ()
        self.brake = Brake()
        self._predicted: tuple[float, ...] = ()  # chance of each position; empty: no prediction
        self._served_prediction: tuple[float, ...] = ()
        #: chance of each position, in the last phase that drafted enough; until something newer is known of the draft
        self._measured: tuple[float, ...] | None = None
        self._deepest: tuple[float, ...] = ()  # the same, beyond that one's largest k from phases before it
        self._tried = False
        self._correction = 1.0
        self._warned = False
        self._undrafted = 0  # phases in a row
        self._load: dict[int, float] = {}
        self._plan = plan.no_drafts(0, Reason.NO_DRAFT_YET)
        self._realised: float | None = None
        self._dropped = False  # was the draft, within the last phase
        self._newborn: bool | None = None  # not known before the first refresh
        self._plain_seconds = 0.0  # of the last phase without drafts
        self._granted = self._head_start = 0.0  # seconds of head start, in all and for the last slice

    @hookimpl
    def spec_configure(self, config: SpecConfig, target: TargetInfo, method: Method) -> None:
        """A break-even that the user set holds for every batch size."""
        self._config, self._target, self._method = config, target, method
        self.cost = CostModel(Experts.of(target.hf_config))
        self._plan = plan.no_drafts(target.max_num_seqs, Reason.NO_DRAFT_YET)
        self._fixed = config.serve == "always" or (config.serve == "auto" and config.controller == "fixed")
        if config.serve == "auto" and not self._fixed and config.break_even is None and not config.self_test:
            raise SpecConfigError(
                "spec.self_test=False leaves break-even unmeasured, so that spec.serve=auto could never decide to speculate: "
                "set spec.break_even, or spec.serve=always or never"
            )

    @hookimpl
    def spec_engine_ready(self, report: SelfTestReport) -> None:
        """Take over what was measured on the running engine."""
        self._calibration = report.steps
        self.cost.observe(report.steps, calibration=True)
        if not self._load:  # nothing is known of the rollouts yet: they are as likely at each size that was measured
            self._load = {t.batch: float(t.batch) for t in report.steps}

    @hookimpl
    def spec_save(self, path: Path) -> None:
        """What the start-up measured, for ``spec-plugin project --calibration``; a resumed run measures its own engine."""
        if self._calibration:
            path.mkdir(parents=True, exist_ok=True)
            partial = path / "calibration.json.partial"
            partial.write_text(json.dumps([asdict(step) for step in self._calibration]))
            os.replace(partial, path / "calibration.json")

    @hookimpl
    def spec_refreshed(self, refresh: DraftRefresh, report: RefreshReport) -> None:
        """Take over what training predicts for an installed draft, and forget what a useless one before it showed."""
        if self._newborn is None:
            self._newborn = refresh.draft_version == 0  # a resumed one is not
        if not report.installed:
            return
        self._predicted = refresh.expected_chances
        if self._predicted and (self._undrafted or (self._measured is not None and self._useless(self._measured))):
            self._measured = None  # of a draft before this one

    @hookimpl
    def spec_rollout_end(self, stats: RolloutStats) -> None:
        """Learn what steps cost, what is accepted, and whether it paid."""
        self.cost.observe(stats.steps)
        drafted = stats.drafts > 0
        self._undrafted = 0 if drafted else self._undrafted + 1
        if not drafted:
            self._plain_seconds = stats.seconds
            if stats.shadow_rounds >= _MIN_DRAFTS:  # the engine itself has seen what drafting would have done
                self._predicted = conditional_acceptance(stats.shadow_per_pos, stats.shadow_rounds)
                self._measured = None
        self._tried = self._tried or drafted  # too few drafts to measure are still some that the cut-off let pass
        if drafted and stats.forwards >= _MIN_DRAFTS:
            self._measured = _acceptance_of(stats)
            self._deepest = (*self._measured, *self._deepest[len(self._measured) :])
            self._compare(stats)
            if self._useless(self._measured):
                self._plain_seconds = stats.seconds  # of a phase as good as plain
        self._dropped = drafted and any(s.paused for s in stats.steps)
        if self._dropped:
            length, version = stats.tokens_per_forward, stats.policy_version
            logger.info(
                "spec-plugin: policy version %d: dropped the draft within the rollout, at %.2f tokens per forward",
                version,
                length,
            )
            self._plan = plan.no_drafts(self._target.max_num_seqs)  # to be served again it must clear the margin
        curve = self.acceptance_curve or (0.0,)
        self._load = plan.load_of(stats.steps, curve) or self._load
        if self.cost.problem is None:
            self._realised = plan.realised_speedup(self.cost, stats.steps, curve) if drafted else None
        if self.brake.rolled_out(stats.tokens / max(stats.seconds, 1e-9), drafted) and not self._fixed:
            logger.warning(
                "spec-plugin: whole rollouts were slower with drafts than without, whatever the cost model says: no drafts "
                "for the next %d rollouts",
                self.brake.left,
            )

    def _compare(self, stats: RolloutStats) -> None:
        """Prediction and engine, where enough was drafted, as far as both have looked."""
        if self._measured is None:
            return
        width = min(len(self._served_prediction), len(self._measured))
        predicted, found = tokens_per_step(self._served_prediction, width), tokens_per_step(self._measured, width)
        if predicted <= 1.2:
            return
        ratio = (found - 1.0) / (predicted - 1.0)
        # the correction falls at once and rises by halves: a draft that training overrates is tried once
        self._correction = max(0.0, min(1.0, ratio, 0.5 * self._correction + 0.5 * ratio))
        if ratio < _MISALIGNED and not self._warned:
            self._warned = True
            logger.warning(
                "spec-plugin: the engine's acceptance length is %.2f where draft training predicted %.2f; if this stays, "
                "trainer and engine run the draft differently (auxiliary layers, norms or positions)",
                found,
                predicted,
            )

    @property
    def acceptance(self) -> float | None:
        """Estimated acceptance length at ``spec.k`` of the draft that the engine serves now; None: nothing is known of it."""
        curve = self.acceptance_curve
        return None if curve is None else tokens_per_step(curve, self._config.k)

    @property
    def acceptance_curve(self) -> tuple[float, ...] | None:
        """The same by position: the chance that each is accepted, given those before it; beyond its end the last one holds.

        Beyond the largest k of the last phase, what training predicts or an earlier phase has shown; else the engine finds
        out. Beyond what training unrolls nothing is promised before it was drafted.
        """
        if self._measured is not None:
            deeper = self._predicted if len(self._predicted) > len(self._measured) else self._deepest
            return (*self._measured, *deeper[len(self._measured) :])
        if not self._predicted:
            return None
        first, *more = self._predicted  # the whole gain is in proportion to the first chance
        return (first * self._correction, *more, 0.0)

    @hookimpl
    def spec_schedule(self, policy_version: int) -> Schedule:
        """k per batch size for the coming rollout phase, and what makes the engine drop the draft before its end."""
        chosen = self._choose()
        vocabulary = self._target.vocab_size
        if self._target.device_type == "cuda" and vocabulary is not None and chosen.speculates:
            table = plan.fit_sampler_memory(chosen.table, vocabulary, _SAMPLER_ROOM)
            table = tuple(k * (k == self._config.k) for k in table) if self._method.whole else table
            chosen = replace(chosen, table=table) if any(table) else plan.no_drafts(len(table) - 1, Reason.NO_ROOM)
        if chosen.table != self._plan.table and not self._fixed:
            known = "" if self.acceptance is None else f" (acceptance length {self.acceptance:.2f}"
            gain = f", predicted speed-up {chosen.speedup:.2f}x)" if chosen.speculates else ")"
            said = plan.describe(chosen.table) + (known + gain if known else "")
            logger.info("spec-plugin: policy version %d: %s", policy_version, said)
        self._plan = chosen
        self._served_prediction = self._predicted if chosen.speculates else ()
        return Schedule(chosen.table, self._break_even(chosen.table))

    def _break_even(self, table: Sequence[int]) -> tuple[float, ...]:
        if self._fixed or not any(table):
            return ()
        if self._config.break_even is not None:
            return (self._config.break_even,) * len(table)
        if self.cost.problem is not None:
            return (_BREAK_EVEN_UNKNOWN,) * len(table)
        return plan.break_even_of(self.cost, table)

    def _choose(self) -> Plan:
        config, size = self._config, self._target.max_num_seqs
        if self._fixed:
            return plan.fixed(config.k, size, Reason.ASKED_FOR)
        if config.serve == "never" or self.brake.on:
            return plan.no_drafts(size, Reason.SERVE_NEVER if config.serve == "never" else self.brake.reason)
        acceptance, curve = self.acceptance, self.acceptance_curve
        if config.break_even is None and self.cost.problem is not None:
            # what a try shows may solve it; without one nothing new would ever be timed
            tried = acceptance is not None and self._undrafted >= _TRY_EVERY
            unknown = Reason.NO_DRAFT_YET if acceptance is None else Reason.COST_UNKNOWN
            return self._try() if tried else plan.no_drafts(size, unknown)
        if acceptance is None or curve is None:
            # A draft that knows something is tried out for one phase; a new one waits for its first training.
            due = self._method.ready and (not self._tried or self._undrafted >= _TRY_EVERY)
            return self._try() if due else plan.no_drafts(size, Reason.NO_DRAFT_YET)
        if config.break_even is not None:
            return plan.threshold(config.k, acceptance, {size: config.break_even}, self._plan.speculates, size)
        # what training has only promised is put to the test with few tokens a step: the policy moves, the replay does not
        chosen = plan.best(
            self.cost, curve, self._load, self._plan.table, self._ks(config.k if self._tried else self._try_k)
        )
        if self._method.ready and self._tried and not self.brake.compares and chosen.speedup < _SURE:
            # one plain phase: whoever drafts from the first one on leaves nothing to compare with
            return plan.no_drafts(size, Reason.COMPARISON)
        return self._try() if not chosen.speculates and self._undrafted >= _TRY_EVERY else chosen

    def _try(self) -> Plan:
        return plan.fixed(self._try_k, self._target.max_num_seqs, Reason.A_TRY)

    @property
    def _try_k(self) -> int:
        return self._config.k if self._method.whole else min(_TRY_K, self._config.k)

    def _ks(self, most: int) -> Sequence[int]:
        """The k that the method can draft, 0 among them."""
        return (0, most) if self._method.whole else range(most + 1)

    def head_start(self) -> float:
        """Seconds that the next slice of training may take beyond its share; of all ranks' answers the largest holds.

        A newborn draft gets them, as long as nothing is drafted: each step without it costs what it would save.

        What it would save is what the cost model says of a draft that has learnt for one step; where not even that would be
        faster than plain decoding, or where it is good enough already, nothing is granted.
        """
        self._head_start = 0.0
        config = self._config
        wanted = self._newborn and config.serve == "auto" and not self._fixed
        if not wanted or not self._knows_nothing or not self._load or self.cost.problem is not None:
            return 0.0
        nothing = plan.no_drafts(self._target.max_num_seqs).table
        if (
            self.acceptance_curve
            and plan.best(self.cost, self.acceptance_curve, self._load, nothing, self._ks(config.k)).speculates
        ):
            return 0.0
        hoped = plan.best(self.cost, (_HOPED_CHANCE,), self._load, nothing, self._ks(config.k)).speedup
        saved = self._plain_seconds * (1.0 - 1.0 / hoped)
        left = config.head_start * self._plain_seconds - self._granted
        self._head_start = max(0.0, min(left, _PAYS_BACK_WITHIN * saved))
        self._granted += self._head_start
        return self._head_start

    @property
    def _knows_nothing(self) -> bool:
        """Is the draft untrained and was never tried, or was it given, tried, and found to know nothing."""
        if self._method.newborn:
            return not self._tried and self._plain_seconds > 0.0
        return bool(self._deepest) and self._useless(self._deepest) and self._plain_seconds > 0.0

    @staticmethod
    def _useless(chances: Sequence[float]) -> bool:
        return tokens_per_step(chances, len(chances)) < KNOWS_NOTHING

    @hookimpl
    def spec_metrics(self) -> dict[str, float]:
        """Schedule, break-even per batch size, predicted and realised speed-up."""
        size = len(self._plan.table) - 1
        trusted = self.cost.problem is None  # looks at every cell
        out = {"spec/dropped": float(self._dropped)}
        out |= as_metrics(
            self._plan.reason, Speculation.DROPPED if self._dropped and not self._plan.speculates else None
        )
        out["spec/head_start_ms"] = self._head_start * 1e3
        if self._config.break_even is not None and size:
            out[f"spec/break_even_b{size}"] = self._config.break_even
        elif trusted:
            out.update({f"spec/break_even_b{b}": self.cost.break_even(b, self._config.k) for b in sizes_shown(size)})
        if self._plan.speculates and trusted:
            out["spec/speedup_predicted"] = self._plan.speedup
        if self._realised is not None:
            out["spec/speedup_realised"] = self._realised
        return out


def _acceptance_of(stats: RolloutStats) -> tuple[float, ...]:
    """Chance of each position. Steps with a smaller k never drafted the later ones: the step log says how many did."""
    if not stats.accepted_per_pos:  # an engine that counts no positions
        assert stats.acceptance_length is not None
        k = max(1, round(stats.draft_tokens / stats.drafts))
        return (constant_acceptance(stats.acceptance_length, k),) * k
    raw = conditional_acceptance(stats.accepted_per_pos, stats.forwards)
    width = len(stats.accepted_per_pos)
    drafted = [float(sum(s.batch * s.steps for s in stats.steps if s.k > i)) for i in range(width)]
    if not drafted or drafted[0] <= 0:
        return raw
    out = []
    for i, chance in enumerate(raw):
        share = 1.0 if i == 0 else drafted[i] / drafted[i - 1] if drafted[i - 1] else 0.0
        if share <= 0.0:
            break  # never drafted: nothing is known, the last known chance is as good a guess as any
        out.append(min(1.0, chance / share))
    return tuple(out)
