"""What a step costs rank 0 at 16 engines of 1024 requests of up to 16,000 tokens: its share, and not more with each step."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders.steps import mixed_steps

from spec_plugin.api import spans as spans_module
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.events import (
    Drafts,
    LogprobBatch,
    RolloutStats,
    Schedule,
    SelfTestReport,
    StepTiming,
    TargetInfo,
)
from spec_plugin.api.method import Method, StartingDraft
from spec_plugin.api.spans import Span, Spans, fingerprints
from spec_plugin.policy.break_even.controller import BreakEvenController
from spec_plugin.policy.provenance import ProvenanceGuard
from spec_plugin.step_cost.bands import band_of
from spec_plugin.trainer.links import merge_stats

ENGINES, REQUESTS, K, LONGEST = 16, 1024, 8, 16_384
BANDS = sorted({band_of(b) for b in range(1, REQUESTS + 1)})


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def seconds(batch: float, k: int) -> float:
    return 0.01 + 2e-5 * batch * (k + 1) + 3e-4 * k


def an_engine(table: tuple[int, ...], rng: random.Random) -> RolloutStats:
    """A phase whose batch has drained from all requests to one, some of whose steps were not alike."""
    ks = [(b - (b > 16) * rng.uniform(0.0, 0.9), table[b]) for b in BANDS]  # means of a band's steps
    alike = [StepTiming(b, k, not any(table), seconds(b, k) * rng.uniform(0.97, 1.03), 40, 4000.0) for b, k in ks]
    mixed = [mixed_steps(b, k, False, 3 * seconds(b, k), 3, 2 * b * (k > 0)) for b, k in ks]
    n = sum(t.forwards for t in alike if t.k)
    accepted = tuple(int(share * n) for share in (0.8, 0.6, 0.4, 0.3, 0.2, 0.1, 0.1, 0.05))[: max(table)]
    return RolloutStats(
        1,
        REQUESTS,
        10**6,
        100.0,
        n,
        3 * n,
        sum(accepted),
        accepted,
        (*alike, *mixed),
    )


def a_controller(draft: StartingDraft | None = None) -> BreakEvenController:
    controller = BreakEvenController()
    target = TargetInfo("", {"vocab_size": 152_000}, "bfloat16", device_type="cuda", max_num_seqs=REQUESTS)
    controller.spec_configure(SpecConfig.parse({"k": K}), target, Method("eagle3", {}, draft=draft))
    kinds = [(b, k, k == 0) for b in (1, 8, 32, 128) for k in (0, 1, 3, K)]
    kinds += [(b, 0, False) for b in (1, 8, 32, 128)]
    steps = tuple(StepTiming(*kind, seconds(*kind[:2]), 16, 50.0) for kind in kinds)
    controller.spec_engine_ready(SelfTestReport((), 1.0, steps))
    controller.acceptance_estimate.predicted((0.8, 0.75, 0.7))
    return controller


def a_step(controller: BreakEvenController, stats: RolloutStats) -> Schedule:
    controller.spec_rollout_end(stats)
    assert controller.spec_slowdown_without_drafts(stats=max(stats.parts, key=lambda e: e.busy_seconds)) is not None
    controller.spec_head_start()
    assert any(name.startswith("spec/break_even") for name in controller.spec_metrics())
    return controller.spec_schedule(2)


def test_whether_a_draft_may_come_to_pay_is_asked_in_milliseconds_however_long_the_run() -> None:
    controller, rng = a_controller(StartingDraft(None, None)), random.Random(0)  # type: ignore[arg-type]
    plain = merge_stats([an_engine((0,) * (REQUESTS + 1), rng) for _ in range(ENGINES)])
    for _ in range(5000):
        controller.outlook.measured((0.1 + 1e-3 * rng.random(), 0.05, 0.0))
    controller.acceptance_estimate.predicted((0.1, 0.05))
    controller.states.tried = True
    controller.spec_rollout_end(plain)
    assert not controller.spec_can_pay()
    assert cpu_seconds(lambda: controller.spec_rollout_end(plain)) < 0.1


def test_what_the_controller_keeps_and_does_in_a_step_does_not_grow_with_the_run() -> None:
    controller, rng = a_controller(), random.Random(0)
    kept = []
    for phase in range(90):  # each k at every batch size, ten times
        k = phase % (K + 1)
        controller.cost.observe(an_engine((0, *[k] * REQUESTS), rng).steps)
        kept.append(sum(map(len, controller.cost._seen.values())))
    kinds = len(controller.cost._seen)
    assert kinds <= (K + 2) * len(BANDS) + 20 and len(BANDS) == 64
    assert kept[-1] == kept[-9] <= 9 * kinds
    parts = [an_engine((0, *[3] * REQUESTS), rng) for _ in range(ENGINES)]
    stats = merge_stats(parts)
    assert len(stats.steps) == 2 * len(stats.alike) == 2 * len(BANDS), "engines are not looked at one by one"
    assert cpu_seconds(lambda: merge_stats(parts)) < 0.2
    schedules = []
    assert cpu_seconds(lambda: schedules.append(a_step(controller, stats))) < 0.2
    assert len(schedules[0].table) == REQUESTS + 1


def spans_of(documents: np.ndarray, version: int) -> list[Span]:
    return [Span(int(fingerprints(tokens)[-1]), 64, len(tokens), version, 0, 0) for tokens in documents]


def test_who_sampled_a_batch_is_found_in_a_time_that_grows_with_its_tokens() -> None:
    rng, spans = np.random.default_rng(0), Spans()
    spans.add((Span(int(m), 64, 4000, 0, 0, 0) for m in rng.integers(1, 2**62, ENGINES * REQUESTS)), 0)
    took = {}
    for length in (LONGEST // 2, LONGEST):
        documents = rng.integers(0, 152_000, (64, length))
        spans.add(spans_of(documents, 1), 1)
        batch, mask = [torch.from_numpy(d) for d in documents], torch.ones(64, length - 64, dtype=torch.bool)
        versions, *_ = spans.of(batch, [64] * 64, mask)
        assert bool((versions == 1).all())
        took[length] = min(cpu_seconds(lambda b=batch, m=mask: spans.of(b, [64] * 64, m)) for _ in range(3))
    assert took[LONGEST] < 4 * took[LONGEST // 2], took
    assert took[LONGEST] / (64 * LONGEST) < 1e-6, "ten times what it takes"


def test_what_is_remembered_of_old_samples_has_an_end_however_many_engines_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert spans_module._REMEMBERED >= 16 * ENGINES * REQUESTS, "of as many steps"
    monkeypatch.setattr(spans_module, "_REMEMBERED", 16 * REQUESTS)
    rng, spans = np.random.default_rng(1), Spans()
    for version in range(50):
        marks = rng.integers(1, 2**62, REQUESTS)
        spans.add((Span(int(mark), 64, 4000, version, 0, 0) for mark in marks), version)
        assert spans._maybe.sum() <= len(spans)
    assert len(spans) == 16 * REQUESTS == len(spans._known), "the newest versions"
    assert min(span.version for same in spans._known.values() for span in same) == 34


def a_batch(rows: int, tokens: int) -> LogprobBatch:
    """Of log-normal lengths, cut at ``tokens``; every fiftieth sequence has a stretch without drafts."""
    rng, random_numbers = np.random.default_rng(2), torch.Generator().manual_seed(0)
    lengths = np.minimum(tokens, rng.lognormal(np.log(0.45 * tokens), 0.6, rows)).astype(int)
    mask = torch.arange(tokens) < torch.from_numpy(lengths)[:, None]
    recomputed = -1.0 - torch.rand(rows, tokens, generator=random_numbers)
    off = 0.01 * torch.randn(rows, tokens, generator=random_numbers)
    drafted = torch.full((rows, tokens), int(Drafts.ON), dtype=torch.uint8)
    drafted[::50, :64] = int(Drafts.CONTROL)
    return LogprobBatch(1, recomputed, recomputed + off, mask, torch.full((rows, tokens), 1), drafted, False)


@pytest.mark.parametrize("lagging", [False, True])
def test_the_guard_takes_a_time_that_grows_with_the_tokens(lagging: bool) -> None:
    """A quarter of the rows that rank 0 of 64 has of 16 engines."""
    guard, took = ProvenanceGuard(), {}
    guard.spec_configure(SpecConfig.parse({}), TargetInfo("", {}, "bfloat16"))
    for tokens in (LONGEST // 2, LONGEST):
        batch = replace(a_batch(64, tokens), lag_allowed=lagging)
        guard.spec_check_logprobs(batch)
        took[tokens] = min(cpu_seconds(lambda b=batch: guard.spec_check_logprobs(b)) for _ in range(3))
    assert took[LONGEST] < 4 * took[LONGEST // 2], took
    assert took[LONGEST] < 2.0, "ten times what it takes"
