"""An engine under the plugin's own controller: the calibration that it needs, and its decisions from phase to phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.events import DraftRefresh, RefreshReport, RolloutStats, SelfTestReport, TargetInfo
from spec_plugin.api.method import Method
from spec_plugin.policy.break_even.controller import BreakEvenController

if TYPE_CHECKING:
    from examples.bench.engines import Remote, Timing
    from examples.bench.workload import Prompts


def calibrate(
    flag: Remote, prompts: Prompts, sizes: Sequence[int], k: int, repeats: int = 3, steps: int = 10
) -> SelfTestReport:
    """What the self-test measures: steps at some batch sizes, without drafts, with one token, with three and with k.

    Without drafts once with the draft paused and once while it reads.

    Args:
        flag: the engine, with any draft that proposes something.
        prompts: as many as the largest size.
        sizes: batch sizes.
        k: most tokens drafted.
        repeats: runs of each; the first is dropped.
        steps: of each, if all drafts were right.
    """
    flag.take_steps()
    timed = []
    for batch in sizes:
        for repeat in range(repeats):
            for width in (*dict.fromkeys((0, 1, min(3, k), k)), None):
                if width is None:
                    flag.set_reading()
                else:
                    flag.set_k(width)
                flag.run(prompts[:batch], 1.0, 2 + steps * ((width or 0) + 1))
                found = flag.take_steps()
                timed += found if repeat else []
    return SelfTestReport((), 0.0, steps=tuple(timed))


class Steered:
    """One draft in one engine, with k chosen as in a trainer: from the calibration, a promise, then what each phase shows."""

    def __init__(
        self,
        flag: Remote,
        calibration: SelfTestReport,
        promised: Sequence[float] | None,
        *,
        k: int,
        max_num_seqs: int,
        dtype: str = "float32",
        given: bool = False,
        method: Method | None = None,
    ) -> None:
        """A controller of its own.

        Args:
            flag: the engine, with the draft installed.
            calibration: see :func:`calibrate`.
            promised: chance of each drafted token that training predicts; empty: none. None: there is nothing to refresh.
            k: most tokens drafted.
            max_num_seqs: of the engine.
            dtype: of the engine.
            given: the user brought the draft, which is then tried out where nothing is promised.
            method: what drafts; none: a draft that is trained.
        """
        self._flag, self._method = flag, method or Method("bench", {}, pretrained=given)
        self._controller = BreakEvenController()
        target = TargetInfo("", {}, dtype, max_num_seqs=max_num_seqs)
        self._controller.spec_configure(SpecConfig.parse({"k": k}), target, self._method)
        self._controller.spec_engine_ready(calibration)
        if promised is not None:
            refresh = DraftRefresh(0, 0, {}, "", tuple(promised))
            self._controller.spec_refreshed(refresh, RefreshReport(True, 0, "", 0.0))
        #: the table of each phase: k at batch size 1, at half of the batch and at all of it; a ! where the draft was dropped
        self.chosen: list[str] = []
        #: target forwards of single requests while k was above 0, of all phases
        self.forwards = 0

    def run(self, phase: int, prompts: Prompts, temperature: float, lengths: Sequence[int]) -> Timing:
        """A rollout phase; the engine has the draft already."""
        schedule = self._controller.spec_schedule(phase)
        self.chosen.append(_short(schedule.table, max(1, len(prompts))))
        self._flag.set_schedule(schedule)
        self._flag.take_steps()  # those of other arms
        self._flag.take_pairs()
        timing = self._flag.run(prompts, temperature, lengths)
        rounds, would = (0, ()) if self._method.memory is None else self._flag.rpc("spec_take_shadow")
        if self._method.memory is not None:
            self._flag.rpc("spec_take_rollouts")  # the phase is over
        steps, rest = tuple(self._flag.take_steps()), self._flag.rest_of_steps()
        stats = RolloutStats(
            policy_version=phase,
            requests=len(prompts),
            tokens=sum(lengths),
            seconds=timing.total.wall,
            drafts=timing.drafts,
            accepted_tokens=timing.accepted,
            accepted_per_pos=timing.per_pos,
            steps=steps,
            past_end_per_pos=rest.past_end_per_pos,
            busy_seconds=rest.busy_seconds,
            shadow_rounds=rounds,
            shadow_per_pos=tuple(would),
            pairs=tuple(self._flag.take_pairs()),
        )
        self.forwards += stats.forwards if stats.drafts else 0
        self._controller.spec_rollout_end(stats)
        self.chosen[-1] += "!" * int(self._controller.spec_metrics()["spec/dropped"])
        return timing


def _short(table: Sequence[int], batch: int) -> str:
    """k at 1, at half of the batch and at the whole."""
    return "/".join(str(table[b]) for b in dict.fromkeys((1, max(1, batch // 2), batch)))
