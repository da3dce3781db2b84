"""The self-test while k changes under running requests, on an engine that is played here."""

from __future__ import annotations

import asyncio
import contextlib
import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from spec_plugin.engine.selftest import switching
from spec_plugin.engine.selftest.probe import Probe
from spec_plugin.engine.selftest.self_test_plan import SelfTestPlan
from spec_plugin.engine.selftest.switching import switching_stage
from spec_plugin.engine.vllm.schedule import channel

VOCAB, K, SEQS = 32, 3, 16


class Played:
    """Its policy says the token + 5 with a chance of 85 %; a paused draft hands out rows of long ago, as V2's does."""

    def __init__(self, takes_stale_rows: bool = True, v2: bool = True) -> None:
        self.rng, self.takes = random.Random(0), takes_stale_rows
        self.table, self.paused, self.stale = [K] * (SEQS + 1), False, False
        self.requests: list[dict[str, Any]] = []
        self.drafts = 0
        self.lowered = False  # did a table ask for less under requests that had drafts
        model = SimpleNamespace(logprobs_mode="raw_logprobs", max_logprobs=20, max_model_len=4096)
        self.vllm_config, self.engine_core = SimpleNamespace(model_config=model, use_v2_model_runner=v2), self

    def _next(self, token: int) -> int:
        return (token + 5) % VOCAB if self.rng.random() < 0.85 else self.rng.randrange(VOCAB)

    def step(self) -> None:
        for request in self.requests:
            tokens, k = request["tokens"], 0 if request["plain"] else max(self.table)
            self.drafts += k > 0
            for _ in range(k + 1 if k else 1):
                wrong = k and self.stale and self.takes
                tokens.append(self.rng.randrange(VOCAB) if wrong else self._next(tokens[-1]))
            request["drafted"] |= k > 0
        self.stale = self.paused

    async def call_utility_async(self, name: str, *args: Any) -> Any:
        if name == "spec_set_schedule":
            self.lowered |= max(args[0]) < max(self.table) and any(r["drafted"] for r in self.requests)
            self.table = list(args[0])
        elif name == "spec_pause":
            (self.paused,) = args
        self.step()
        await asyncio.sleep(0)
        return {"table": self.table}

    async def generate(self, prompt: Any, params: Any, **_: Any) -> Any:
        ids = prompt["prompt_token_ids"]
        request = {"tokens": list(ids), "plain": bool(params.extra_args), "drafted": False}
        self.requests.append(request)
        try:
            done = 0
            while done < params.max_tokens:
                await asyncio.sleep(0)
                tokens = request["tokens"][len(ids) : len(ids) + params.max_tokens]
                if len(tokens) > done:
                    done = len(tokens)
                    logprobs = [{token: SimpleNamespace(logprob=-1.0)} for token in tokens]
                    yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)])
        finally:
            self.requests.remove(request)

    async def drive(self) -> None:
        while True:
            self.step()
            await asyncio.sleep(0)


def judge(monkeypatch: pytest.MonkeyPatch, engine: Any, whole: bool = False, seconds: float = 1e9) -> Any:
    """The stage's one check."""
    monkeypatch.setattr(switching, "read_spec_counters", lambda: {"drafts": engine.drafts})
    prompts = [[i, i + 1] for i in range(4)]
    plan = SelfTestPlan(
        prompts=prompts,
        sampling={},
        k=K,
        vocab_size=VOCAB,
        alpha=1e-6,
        seconds=seconds,
        limit=1e9,
        max_num_seqs=SEQS,
        whole=whole,
    )

    async def run() -> list[Any]:
        driver = asyncio.ensure_future(engine.drive())
        try:
            probe = Probe(engine, {"temperature": 1.0}, SEQS)
            return [check async for check in switching_stage(probe, plan)]
        finally:
            driver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await driver

    (check,) = asyncio.run(run())
    assert engine.table == [K] * (SEQS + 1) and not engine.paused and not engine.requests
    return check


async def table_first(engine: Any, schedule: Any) -> None:
    """What the front did once."""
    await channel.set_schedule(engine, schedule.table, schedule.break_even)
    await channel.pause_idle_draft(engine, not any(schedule.table))


@pytest.mark.parametrize("whole", [False, True])
def test_an_engine_whose_draft_goes_on_in_the_right_order_passes(monkeypatch, whole):
    engine = Played()
    check = judge(monkeypatch, engine, whole)
    assert check.passed, check.detail
    assert "times under running requests" in check.detail and " 0 drafts" not in check.detail
    assert not (whole and engine.lowered), "a target with states is never asked for less under requests that had drafts"


@pytest.mark.parametrize("whole", [False, True])
def test_law_2_rows_that_were_drafted_long_ago_are_seen(monkeypatch, whole):
    monkeypatch.setattr(switching, "put_in_force", table_first)
    check = judge(monkeypatch, Played(), whole)
    assert not check.passed and not check.out_of_time, check.detail


def test_a_wrong_order_that_costs_nothing_passes(monkeypatch):
    """Drafts without probabilities of their own: stale ones are refused by the rules."""
    monkeypatch.setattr(switching, "put_in_force", table_first)
    assert judge(monkeypatch, Played(takes_stale_rows=False)).passed


def test_too_few_sequences_in_the_time_are_named_unproven_and_refuse_nobody(monkeypatch):
    check = judge(monkeypatch, Played(), seconds=0.0)
    assert check.passed and check.unproven and "where 64 would do" in check.detail


def test_an_engine_that_verifies_nothing_meanwhile_proves_nothing_and_is_not_refused(monkeypatch):
    """As one on a busy machine, whose requests end before the schedule changes: that it drafts at all ``samples`` has shown."""
    engine = Played(v2=False)
    monkeypatch.setattr(type(engine), "drafts", property(lambda _: 0, lambda *_: None), raising=False)
    check = judge(monkeypatch, engine)
    assert check.passed and check.unproven and "no draft came under running requests" in check.detail


def test_requests_that_end_before_the_schedule_changes_are_followed_by_longer_ones(monkeypatch):
    engine, asked = Played(v2=False), []
    usual = engine.generate

    def generate(prompt, params, **options):
        asked.append(params.max_tokens)
        return usual(prompt, params, **options)

    monkeypatch.setattr(engine, "generate", generate)
    monkeypatch.setattr(type(engine), "drafts", property(lambda _: 0, lambda *_: None), raising=False)
    judge(monkeypatch, engine)
    usual_length = switching.BEGUN + switching.MORE + 2 * K
    lengths = list(dict.fromkeys(n for n in asked if n >= usual_length))
    assert lengths[:4] == [usual_length * n for n in (1, 2, 4, 8)] and max(lengths) == 8 * usual_length
    engine.vllm_config.model_config.max_model_len, asked = 30, []
    judge(monkeypatch, engine)
    assert max(asked) == 30 - 2 - 1, "and never longer than the engine takes"


def test_law_2_a_fault_that_shows_in_a_round_without_drafts_is_still_a_fault(monkeypatch):
    monkeypatch.setattr(switching, "put_in_force", table_first)
    engine = Played()
    monkeypatch.setattr(switching, "counts_check", lambda *_: switching.Check("samples: k switched", False, "differs"))
    assert not judge(monkeypatch, engine).passed
