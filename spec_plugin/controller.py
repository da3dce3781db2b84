"""Break-even: speculate only for the batch sizes at which the draft's acceptance length pays for its cost (law 7)."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Mapping

from spec_plugin.config import SpecConfig
from spec_plugin.errors import SpecConfigError
from spec_plugin.events import DraftRefresh, RefreshReport, RolloutStats, SelfTestReport, TargetInfo
from spec_plugin.hookspecs import hookimpl

logger = logging.getLogger(__name__)

#: Speculation is switched on above break-even by this factor, off below break-even: no flapping on noise.
_MARGIN = 1.05
#: Verification steps below which a rollout phase says nothing about acceptance.
_MIN_DRAFTS = 64
#: Engine and training disagree about acceptance beyond this ratio of the gain only when they are misaligned.
_MISALIGNED = 0.5


def schedule_table(
    k: int, acceptance: float, break_even: Mapping[int, float], serving: bool, max_num_seqs: int
) -> tuple[int, ...]:
    """k for each batch size, from the acceptance length and the break-even measured at some batch sizes.

    A batch size between two measured ones takes the larger one's break-even, one beyond all the last's.

    Args:
        k: tokens to draft where speculation pays.
        acceptance: acceptance length of the draft, bonus token included.
        break_even: batch size -> acceptance length at which speculation is as fast as plain decoding; not empty.
        serving: was speculation on before; if not, it must clear a small margin.
        max_num_seqs: largest batch size of the engine.

    Returns:
        Table of length ``max_num_seqs + 1``.
    """
    sizes = sorted(break_even)
    margin = 1.0 if serving else _MARGIN
    table = [0]
    for batch in range(1, max_num_seqs + 1):
        measured = sizes[min(bisect_left(sizes, batch), len(sizes) - 1)]
        table.append(k if acceptance > break_even[measured] * margin else 0)
    return tuple(table)


class BreakEvenController:
    """Chooses k for each batch size before each rollout phase.

    While speculation is on, the acceptance length is the engine's own. While it is off, it is what draft training
    predicts, corrected by how far prediction and engine were apart when last compared.
    """

    def __init__(self) -> None:
        self._break_even: dict[int, float] = {}
        self._predicted: float | None = None
        self._served_prediction: float | None = None
        self._measured: float | None = None
        self._tried = False
        self._correction = 1.0
        self._warned = False
        self._table: tuple[int, ...] = ()

    @hookimpl
    def spec_configure(self, config: SpecConfig, target: TargetInfo) -> None:
        """A break-even that the user set holds for every batch size."""
        self._config, self._target = config, target
        if config.break_even is not None:
            self._break_even = {target.max_num_seqs: config.break_even}
        elif config.serve == "auto" and not config.self_test:
            raise SpecConfigError(
                "spec.self_test=False leaves break-even unmeasured, so that spec.serve=auto could never decide to speculate: "
                "set spec.break_even, or spec.serve=always or never"
            )

    @hookimpl
    def spec_engine_ready(self, report: SelfTestReport) -> None:
        """Take over what was measured on the running engine."""
        if self._config.break_even is None:
            self._break_even = dict(report.break_even)

    @hookimpl
    def spec_refreshed(self, refresh: DraftRefresh, report: RefreshReport) -> None:
        """A draft that was not installed predicts nothing."""
        if report.installed:
            self._predicted = refresh.expected_acceptance

    @hookimpl
    def spec_rollout_end(self, stats: RolloutStats) -> None:
        """Compare prediction and engine, where enough was drafted."""
        if stats.drafts < _MIN_DRAFTS or stats.acceptance_length is None:
            self._measured = None
            return
        self._measured, self._tried = stats.acceptance_length, True
        if self._served_prediction is not None and self._served_prediction > 1.2:
            ratio = (self._measured - 1.0) / (self._served_prediction - 1.0)
            self._correction = min(1.0, 0.5 * self._correction + 0.5 * ratio)
            if ratio < _MISALIGNED and not self._warned:
                self._warned = True
                logger.warning(
                    "spec-plugin: the engine accepts %.2f tokens per step where draft training predicted %.2f; "
                    "if this stays, draft and engine disagree about layers, norms or positions",
                    self._measured,
                    self._served_prediction,
                )

    @property
    def acceptance(self) -> float | None:
        """Best knowledge of the acceptance length of the draft that the engine serves now."""
        if self._measured is not None:
            return self._measured
        if self._predicted is not None:
            return 1.0 + (self._predicted - 1.0) * self._correction
        return None

    @hookimpl
    def spec_schedule(self, policy_version: int) -> tuple[int, ...] | None:
        """k per batch size for the coming rollout phase."""
        k, size = self._config.k, self._target.max_num_seqs
        acceptance = self.acceptance
        if self._config.serve != "auto":
            table = (0,) + (k if self._config.serve == "always" else 0,) * size
        elif acceptance is None or not self._break_even:
            # A draft that the user brought is tried out for one phase; a new one waits for its first training.
            table = (0,) + (k if self._config.draft is not None and not self._tried else 0,) * size
        else:
            table = schedule_table(k, acceptance, self._break_even, any(self._table), size)
        self._table = table
        self._served_prediction = self._predicted if any(table) else None
        return table

    @hookimpl
    def spec_metrics(self) -> dict[str, float]:
        """Share of batch sizes that speculate, and the break-even that decides."""
        out = {"spec/on": float(any(self._table))}
        for size, value in self._break_even.items():
            out[f"spec/break_even_b{size}"] = value
        return out
