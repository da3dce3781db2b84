"""Break-even control: how many tokens to draft at each batch size, from what the engine's own steps take (law 7)."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import SpecConfigError
from spec_plugin.api.events import (
    DraftRefresh,
    RefreshReport,
    RolloutStats,
    Schedule,
    SelfTestReport,
    StepTiming,
    TargetInfo,
)
from spec_plugin.api.hookspecs import hookimpl
from spec_plugin.api.method import Method
from spec_plugin.api.speculation import Reason, Speculation, as_metrics, in_words, sizes_shown
from spec_plugin.plan.engine_class import keeps_states
from spec_plugin.plan.model_runner import runner_of, v2_verifies_in_chunks
from spec_plugin.plan.text_files import write_whole
from spec_plugin.policy.break_even import plan
from spec_plugin.policy.break_even.acceptance import AcceptanceEstimate
from spec_plugin.policy.break_even.correction import Correction
from spec_plugin.policy.break_even.outlook import Outlook
from spec_plugin.policy.break_even.plan import Plan
from spec_plugin.policy.break_even.states import States
from spec_plugin.policy.sampler_memory import fit_sampler_memory
from spec_plugin.step_cost.chances import tokens_per_step
from spec_plugin.step_cost.model import Corrected, CostModel

logger = logging.getLogger(__name__)

#: what a draft must do in a try to be kept to the rollout's end, times what would be enough otherwise
_TRY_MARGIN = 1.1
#: tokens of a verification step below which a draft is dropped in a try while the timings contradict each other
_BREAK_EVEN_UNKNOWN = 1.5
#: chance of each token of a draft that has learnt for a step or two, and steps within which its head start must pay back
_HOPED_CHANCE, _PAYS_BACK_WITHIN = 0.7, 3


class BreakEvenController:
    """Chooses k for each batch size before each rollout phase; as a batch drains, the engine moves through the table.

    What steps cost, as pairs of steps have put it right (``correction``), and what is accepted choose k (``plan``); when a draft
    is tried, served and rested says the table ``states.NEXT``. A draft that does not pay is dropped within the phase, see
    ``spec_plugin.engine.vllm.schedule.cutoff``.
    """

    def __init__(self) -> None:
        self._config = SpecConfig.parse({})
        self.cost = CostModel()
        self.correction, self.states = Correction(self.cost), States()
        self.outlook = Outlook(self._config.k)
        self._corrected_now: Corrected | None = None  # None: something was learnt since it was last asked for
        self.acceptance_estimate = AcceptanceEstimate()
        self._calibration: tuple[StepTiming, ...] = ()
        self._load: dict[float, float] = {}  # tokens that a rollout generates at each batch size
        self._plan = plan.no_drafts(0, Reason.NO_DRAFT_YET)
        self._table: tuple[int, ...] = ()  # the last one that drafted
        self._dropped = False  # was the draft, within the last phase
        self._served = 0  # rollouts in a row with drafts
        self._realised: float | None = None  # speed-up of the last rollout, where it had drafts
        self._draft_temperature = 1.0  # of the proposals that the estimate is about
        self._newborn: bool | None = None  # not known before the first refresh
        self._plain_seconds = 0.0  # of the last phase without drafts, or as good as without
        self._granted = self._head_start = 0.0  # seconds of head start, in all and for the last slice

    @hookimpl
    def spec_configure(self, config: SpecConfig, target: TargetInfo, method: Method) -> None:
        """Nothing is measured yet."""
        self._config, self._target, self._method = config, target, method
        self.outlook = Outlook(config.k)
        self._plan = plan.no_drafts(target.max_num_seqs, Reason.NO_DRAFT_YET)
        between = keeps_states(target.hf_config)  # k changes between rollouts only
        self.correction, self._corrected_now = Correction(self.cost, whole_rollouts=between), None
        if config.serve == "auto" and not config.self_test:
            raise SpecConfigError(
                "spec.self_test=False leaves break-even unmeasured, so that spec.serve=auto could never decide to speculate: "
                "set spec.serve=always or never"
            )

    @hookimpl
    def spec_engine_ready(self, report: SelfTestReport) -> None:
        """Take over what was measured on the running engine."""
        self._calibration = report.steps or self._calibration  # of a part that times none
        self.cost.observe(report.steps, calibration=True)
        self._corrected_now = None
        if not self._load:  # nothing is known of the rollouts yet: they are as likely at each size that was measured
            self._load = {t.batch: t.batch for t in report.steps}

    @hookimpl
    def spec_save(self, path: Path) -> None:
        """What the start-up measured, for ``spec-plugin project --calibration``; a resumed run measures its own engine."""
        if self._calibration:
            path.mkdir(parents=True, exist_ok=True)
            write_whole(path / "calibration.json", json.dumps([asdict(step) for step in self._calibration]))

    @hookimpl
    def spec_refreshed(self, refresh: DraftRefresh, report: RefreshReport) -> None:
        """Take over what training predicts for an installed draft."""
        if self._newborn is None:
            self._newborn = refresh.draft_version == 0  # a resumed one is not
        if report.installed:
            if refresh.draft_temperature != self._draft_temperature:  # what was measured is of other proposals
                self._draft_temperature, self.acceptance_estimate = refresh.draft_temperature, AcceptanceEstimate()
            self.acceptance_estimate.predicted(refresh.expected_chances)
            self._measured()

    @hookimpl
    def spec_rollout_end(self, stats: RolloutStats) -> None:
        """Learn what steps cost, what is accepted, and whether it paid."""
        drafted = stats.drafts > 0
        self.cost.observe(self.cost.at_usual_speed(stats.alike))
        self.acceptance_estimate.rolled_out(stats)
        self.correction.add(stats)
        self._corrected_now = None
        self._served = self._served + 1 if drafted else 0
        if not drafted or self.acceptance_estimate.knows_nothing:
            self._plain_seconds = stats.seconds
        self._dropped = drafted and any(s.paused for s in stats.steps)
        if self._dropped:
            logger.info(
                "spec-plugin: policy version %d: dropped the draft within the rollout, at %.2f tokens per forward",
                stats.policy_version,
                stats.tokens_per_forward,
            )
        self._load = plan.load_of(stats, self.acceptance_curve or (0.0,)) or self._load
        self._realised = self._slowdown(stats) if drafted else None
        self.states.rolled_out(drafted, self._dropped)
        if self._dropped:
            self._plan = plan.no_drafts(self._target.max_num_seqs)
        self._look_ahead(drafted, stats.policy_version)

    def _measured(self) -> None:
        if self.acceptance_curve is not None:
            self.outlook.measured(self.acceptance_curve)

    def _look_ahead(self, drafted: bool, policy_version: int) -> None:
        """May drafts come to pay, behind a rollout; said where that changes, not at each look."""
        if drafted:
            self._measured()
        config, rested = self._config, self.outlook.resting
        # a try during a look is no change of mind by itself
        serves = self.states.now is Speculation.SERVING or (self.states.serves and not rested)
        if self.cost.problem is not None or serves or not self._trains:
            self.outlook.served()
        else:
            self.outlook.rolled_out(self.acceptance_curve, self._would_pay, self.states.tried)
        if self.outlook.resting is not rested:
            makes = tokens_per_step(self.acceptance_curve or (), config.k)
            logger.info(
                "spec-plugin: policy version %d: %s",
                policy_version,
                f"draft training, harvest and refreshes {self.outlook.why(makes)}"
                if self.outlook.resting
                else "drafts may pay again, draft training goes on",
            )

    @property
    def _trains(self) -> bool:
        """Is there draft work that may be of no use."""
        return self._config.serve == "auto" and self._config.train and self._method.draft is not None

    def _would_pay(self, curve: Sequence[float]) -> bool:
        """Would a draft of these chances, at the batch sizes that ran lately."""
        nothing = plan.no_drafts(self._target.max_num_seqs).table
        return plan.best(self._corrected, curve, self._load, nothing, self._ks).speculates

    @hookimpl
    def spec_can_pay(self) -> bool:
        """Whether drafts may come to pay, at the batch sizes that run and by what the draft has learnt so far."""
        return not self.outlook.rests

    @property
    def acceptance_curve(self) -> tuple[float, ...] | None:
        """See ``AcceptanceEstimate.curve``."""
        return self.acceptance_estimate.curve

    @hookimpl
    def spec_schedule(self, policy_version: int) -> Schedule:
        """k per batch size for the coming rollout phase, and what makes the engine drop the draft before its end."""
        chosen = self._choose()
        if chosen.speculates and self._target.device_type == "cuda" and self._target.vocab_size is not None:
            table = fit_sampler_memory(
                chosen.table,
                self._target.vocab_size,
                ranks=self._target.tensor_parallel,
                sampled=self._method.draws,
                **self._runner,
            )
            table = tuple(k * (k == self._config.k) for k in table) if self._method.all_or_nothing_k else table
            chosen = replace(chosen, table=table) if any(table) else plan.no_drafts(len(table) - 1, Reason.NO_ROOM)
        if chosen.table != self._plan.table and not self._asked_for:
            said = in_words(chosen.table)
            if (curve := self.acceptance_curve) is not None:
                gain = f", predicted speed-up {chosen.speedup:.2f}x" if chosen.speculates else ""
                said += f" (acceptance length {tokens_per_step(curve, self._config.k):.2f} at k={self._config.k}{gain})"
            logger.info("spec-plugin: policy version %d: %s", policy_version, said)
        self._plan, self._table = chosen, chosen.table if chosen.speculates else self._table
        self.acceptance_estimate.serving(chosen.speculates)
        return Schedule(chosen.table, self._break_even(chosen.table), plain_share=self._plain_share(chosen))

    @property
    def _asked_for(self) -> bool:
        """Are drafts served throughout, since the user wants them so."""
        return self._config.serve == "always"

    @cached_property
    def _runner(self) -> Mapping[str, bool]:
        """The engine's model runner as ``fit_sampler_memory`` wants it; read once, since vLLM's sources are parsed for it."""
        v2 = runner_of(self._method.settings, "cuda").v2
        return {"v2": v2, "in_chunks": v2 and v2_verifies_in_chunks()}

    def _plain_share(self, chosen: Plan) -> float:
        if self._asked_for or not chosen.speculates:
            return 0.0
        return self.correction.plain_share(chosen.speedup)

    def _break_even(self, table: Sequence[int]) -> tuple[float, ...]:
        if self._asked_for or not any(table):
            return ()
        if self.cost.problem is not None:
            return (_BREAK_EVEN_UNKNOWN,) * len(table)
        margin = _TRY_MARGIN if self._plan.reason is Reason.A_TRY else 1.0
        return tuple(margin * tokens for tokens in plan.break_even_of(self._corrected, table))

    @property
    def _corrected(self) -> Corrected:
        if self._corrected_now is None:
            self._corrected_now = Corrected(self.cost, self.correction.factor)
        return self._corrected_now

    def _choose(self) -> Plan:
        config, size = self._config, self._target.max_num_seqs
        if self._asked_for:
            return plan.fixed(config.k, size, Reason.ASKED_FOR)
        if config.serve == "never":
            return plan.no_drafts(size, Reason.SERVE_NEVER)
        best = self._best()
        # a draft that knows something is tried at once, a new one when it has learnt something
        ready, pays = self._method.pretrained, best.speculates
        due = (self.states.due or (ready and not self.states.tried)) and (ready or self.acceptance_curve is not None)
        state = self.states.before(pays, due, best.reason)
        if state is Speculation.RESTING or state is Speculation.UNTRIED:
            return plan.no_drafts(size, self.states.why)
        if self.correction.by_rollouts and self._served >= self.correction.plain_every(best.speedup):
            return plan.no_drafts(size, Reason.COMPARISON)
        return best if pays else self._try()

    def _try(self) -> Plan:
        """The k that would lose least by what is known of the draft."""
        size, curve = self._target.max_num_seqs, self.acceptance_curve
        table = plan.fixed(self._config.k, size, Reason.A_TRY).table
        if curve is not None and self.cost.problem is None:
            table = plan.fastest(self._corrected, curve, size, self._ks[1:])
        return Plan(table, 1.0, Reason.A_TRY)

    def _best(self) -> Plan:
        """What is predicted to be fastest, plain decoding or drafts; without a cost model, or a draft, plain decoding."""
        size, curve = self._target.max_num_seqs, self.acceptance_curve
        if curve is None:
            return plan.no_drafts(size, Reason.NO_DRAFT_YET)
        if self.cost.problem is not None:
            return plan.no_drafts(size, Reason.COST_UNKNOWN)
        current = self._table if self.states.serves and self._table else (0,) * (size + 1)
        return plan.best(self._corrected, curve, self._load, current, self._ks)

    @property
    def _ks(self) -> Sequence[int]:
        """The k that the method can draft, 0 first."""
        return (0, self._config.k) if self._method.all_or_nothing_k else range(self._config.k + 1)

    @hookimpl
    def spec_head_start(self) -> float:
        """Seconds that the next slice of training may take beyond its share; of all ranks' answers the largest holds.

        A newborn draft gets them while nothing is drafted, for what it would save in each step, had it learnt for one; nothing is
        granted where not even that would be faster than plain decoding, or where it is good enough already.
        """
        config, self._head_start = self._config, 0.0
        wanted = self._newborn and config.serve == "auto" and self._knows_nothing
        if not wanted or not self._load or self.cost.problem is not None:
            return 0.0
        nothing, ks = plan.no_drafts(self._target.max_num_seqs).table, self._ks
        if self.acceptance_curve and plan.best(self.cost, self.acceptance_curve, self._load, nothing, ks).speculates:
            return 0.0
        hoped = plan.best(self.cost, (_HOPED_CHANCE,), self._load, nothing, ks).speedup
        saved = self._plain_seconds * (1.0 - 1.0 / hoped)
        left = config.head_start * self._plain_seconds - self._granted
        self._head_start = max(0.0, min(left, _PAYS_BACK_WITHIN * saved))
        self._granted += self._head_start
        return self._head_start

    @property
    def _knows_nothing(self) -> bool:
        """Is the draft untrained and was never tried, or was it given, tried, and found to know nothing."""
        known = self.states.tried if self._method.newborn else not self.acceptance_estimate.knows_nothing
        return not known and self._plain_seconds > 0.0

    @hookimpl
    def spec_slowdown_without_drafts(self, stats: RolloutStats) -> float | None:
        """What the steps of a rollout that ``spec_rollout_end`` has seen take without drafts, over what they took; or None."""
        if not stats.drafts and all(s.paused for s in stats.alike if not s.k):
            return 1.0
        return self._slowdown(stats)

    def _slowdown(self, stats: RolloutStats) -> float | None:
        known = self.cost.problem is None
        return plan.slowdown_without(stats, self._corrected, self.acceptance_curve or ()) if known else None

    @hookimpl
    def spec_metrics(self) -> dict[str, float]:
        """Schedule, break-even per batch size, predicted and realised speed-up."""
        size = len(self._plan.table) - 1
        trusted = self.cost.problem is None
        out = {"spec/dropped": float(self._dropped)}
        out |= as_metrics(
            self._plan.reason, Speculation.DROPPED if self._dropped and not self._plan.speculates else None
        )
        out["spec/head_start_ms"] = self._head_start * 1e3
        if trusted:
            out.update({f"spec/break_even_b{b}": self.cost.break_even(b, self._config.k) for b in sizes_shown(size)})
        if self._plan.speculates and trusted:
            out["spec/speedup_predicted"] = self._plan.speedup
        if self._realised is not None:
            out["spec/speedup_realised"] = self._realised
        return out
