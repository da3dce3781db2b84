"""A break-even controller, and what it is told of steps, refreshes and rollouts."""

from __future__ import annotations

from spec_plugin import SpecConfig
from spec_plugin.api.events import (
    DraftRefresh,
    RefreshReport,
    RolloutStats,
    SelfTestReport,
    StepTiming,
    TargetInfo,
)
from spec_plugin.api.method import Method, StartingDraft
from spec_plugin.api.speculation import Reason, Speculation
from spec_plugin.policy.break_even.controller import BreakEvenController
from spec_plugin.step_cost.chances import constant_acceptance

K, SEQS = 3, 8


def controller(measured: dict[int, float] | None = None, /, **options: object) -> BreakEvenController:
    out = BreakEvenController()
    options = {"k": K} | options
    config, target = SpecConfig.parse(options), TargetInfo(path="", hf_config={}, dtype="float32", max_num_seqs=SEQS)
    draft = StartingDraft(None, {} if config.draft else None)  # type: ignore[arg-type]
    out.spec_configure(config, target, Method("mine", {}, draft=draft, pretrained=config.draft is not None))
    if measured is not None:
        out.spec_engine_ready(SelfTestReport((), 1.0, timed(measured)))
    return out


def timed(break_even: dict[int, float]) -> tuple[StepTiming, ...]:
    """What an engine times in which k drafted tokens pay from these acceptance lengths on, and fewer drafts never pay."""
    kinds = [(0, True, 1.0), (0, False, 1.0)]
    out = [StepTiming(b, k, paused, s, 10_000) for b in break_even for k, paused, s in kinds]
    return (*out, *(StepTiming(b, k, False, v, 10_000) for b, v in break_even.items() for k in range(1, K + 1)))


def refreshed(c: BreakEvenController, expected: float | None, installed: bool = True) -> None:
    promised(c, () if expected is None else (constant_acceptance(expected, K),) * K, installed)


def promised(
    c: BreakEvenController, chances: tuple[float, ...], installed: bool = True, draft_temperature: float = 1.0
) -> None:
    refresh = DraftRefresh(1, 1, {}, "", chances, draft_temperature)
    c.spec_refreshed(refresh, RefreshReport(installed, 1, "", 1.0))


def rolled_out(c: BreakEvenController, acceptance: float | None, drafts: int = 1000) -> None:
    drafts = drafts if acceptance else 0
    accepted = round(((acceptance or 1.0) - 1.0) * drafts)
    c.spec_rollout_end(RolloutStats(1, 8, 1000, 1.0, drafts, K * drafts, accepted))


def chosen(c) -> tuple[Speculation, Reason]:
    """What a controller says of the phase that it chooses now."""
    c.spec_schedule(1)
    metrics = c.spec_metrics()
    return Speculation(int(metrics["spec/state"])), Reason(int(metrics["spec/reason"]))
