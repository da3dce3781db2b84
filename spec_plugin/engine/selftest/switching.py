"""Are samples the target's while k changes under running requests, and the draft is paused and goes on.

A rollout phase that is not empty when the next one begins meets all of that, and a step may lie between any two calls of the
control channel. What a step then verifies, and against which probabilities, is another question than whether it samples
rightly while nothing changes: vLLM's V2 runner hands out the rows of the last step that drafted while its draft is paused, and
a table that asked for drafts a step too early had 25 % of the policy's favourite tokens sampled in place of 85 %.

In each round requests leave such rows behind; the draft is paused; as many requests as fit begin without it, half of them
plain to their end; and once each has sampled a few tokens the tables of ``_changes`` come into force, one after the other,
with a step or more between them. The check is ``counts`` of ``verdicts``: the arms differ at the few positions that a switch
falls on, which by-position counts see and a sum over all tokens does not. On that runner with ``probabilistic`` drafts only a
sharp draft shows it, since what is stale is taken where its own, stale probability is as small as the target's; one that has
learnt nothing yet is harmed as little. Measured there with that order, a draft that is always right and 32 requests at once:
at the worst position 10 of 29 against 23 of 27 with 64 sequences an arm (p = 5e-3 after correction), 31 of 66 against 78 of
94 with 192 (1e-4). So the ``SEQUENCES`` are what such a fault takes to be refused, and an engine that has time for fewer may
pass with it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence

from vllm.sampling_params import RequestOutputKind

from spec_plugin.engine.schedule.channel import put_in_force, schedule_state
from spec_plugin.engine.schedule.counters import read_spec_counters
from spec_plugin.engine.selftest.plan import SelfTestPlan
from spec_plugin.engine.selftest.probe import Probe, gather_or_cancel
from spec_plugin.engine.selftest.verdicts import LEAST_SAMPLES, Sampled, counts_check
from spec_plugin.events import Check, Schedule

SEQUENCES = 512  # in each arm, as far as there is time; on V1, whose draft never hands out old rows, LEAST_SAMPLES
BEGUN = 2  # tokens that a request has sampled when the tables begin to change
MORE = 10  # and so many behind that at least: a change takes effect within a few steps
LONGEST = 8  # times as many tokens, after rounds in which no change came while they ran
SWITCHED_UNTIL = 0.85  # share of the time after which no round begins
SWITCHED_FOR = 0.25  # but the rounds have this share of it at least
LATEST = 2.0  # and fewer than LEAST_SAMPLES are drawn only where the test has taken so many times its time
PROMPTS = 4


async def switching_stage(probe: Probe, plan: SelfTestPlan, entries: int, begun: float) -> AsyncIterator[Check]:
    """Rounds of samples under a changing schedule; afterwards all batch sizes draft ``plan.k`` again.

    Args:
        probe: of an engine whose schedule drafts at every batch size.
        plan: of the test.
        entries: length of the engine's schedule, max_num_seqs + 1.
        begun: ``time.perf_counter()`` when the test began.
    """
    prompts = list(enumerate(plan.prompts[:PROMPTS]))
    repeat = max(1, probe.max_num_seqs // (2 * len(prompts)))
    per_round = repeat * len(prompts)
    until = max(begun + SWITCHED_UNTIL * plan.seconds, time.perf_counter() + SWITCHED_FOR * plan.seconds)
    spec: list[Sampled] = []
    plain: list[Sampled] = []
    switches, drafts, longer = 0, 0, 1
    wanted = SEQUENCES if probe.engine.vllm_config.use_v2_model_runner else LEAST_SAMPLES
    for _ in range(math.ceil(wanted / per_round)):
        now = time.perf_counter()
        if (len(spec) >= LEAST_SAMPLES and now > until) or (spec and now > begun + LATEST * plan.seconds):
            break
        sampled, changes, verified = await _round(probe, plan, prompts * repeat, entries, longer)
        spec += sampled[0::2]
        plain += sampled[1::2]
        switches += changes
        drafts += verified
        # requests that ended before the schedule changed, on a machine that is busy with other things
        longer = longer if verified else min(LONGEST, 2 * longer)
    check = counts_check(spec, plain, plan.level, "samples: k switched")
    detail = (
        f"the schedule changed {switches} times under running requests, {drafts} drafts were verified; {check.detail}"
    )
    few, late = len(spec) < LEAST_SAMPLES, drafts == 0
    if (few or late) and (
        check.passed or check.out_of_time
    ):  # nothing wrong; that drafts are verified at all ``samples`` shows
        why = (
            f"{len(spec)} sequences an arm where {LEAST_SAMPLES} would do"
            if few
            else "no draft came under running requests"
        )
        yield Check(check.name, True, f"unproven: {why}; {detail}", unproven=True)
    else:
        yield Check(check.name, check.passed, detail)


def _changes(k: int, whole: bool) -> tuple[int, ...]:
    """Tokens to draft, one after the other, for requests that began without; ``whole``: never less while some are in flight."""
    return (k,) if whole else (k, 0, k, 1, 0, k)


async def _round(
    probe: Probe, plan: SelfTestPlan, prompts: Sequence[tuple[int, Sequence[int]]], entries: int, longer: int
) -> tuple[list[Sampled], int, int]:
    """Both arms of all prompts in turn, how often the schedule changed while they ran, and how many drafts were verified then.

    ``longer``: times as many tokens as a change should take.
    """
    drafting, nothing = Schedule((plan.k,) * entries), Schedule((0,) * entries)
    await put_in_force(probe.engine, drafting)
    short = probe.params(plan.k + 2, plain=False, logprobs=0)
    await gather_or_cancel([probe.sample(i, prompt, short) for i, prompt in prompts[::-1]])
    await put_in_force(probe.engine, nothing)

    before, begun = read_spec_counters()["drafts"], asyncio.Event()
    room = probe.engine.vllm_config.model_config.max_model_len - max(len(prompt) for _, prompt in prompts) - 1
    tokens = min(longer * (BEGUN + MORE + 2 * plan.k), max(room, BEGUN + MORE + 2 * plan.k))
    options = {"logprobs": 0, "output_kind": RequestOutputKind.CUMULATIVE}
    arms = [probe.params(tokens, plain, **options) for plain in (False, True)]
    work = [probe.sample(i, prompt, params, (BEGUN, begun)) for i, prompt in prompts for params in arms]
    running = asyncio.ensure_future(gather_or_cancel(work))
    try:
        changes = await _switch(probe, plan, entries, begun, running)
        return await running, changes, read_spec_counters()["drafts"] - before
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await put_in_force(probe.engine, drafting)


async def _switch(
    probe: Probe, plan: SelfTestPlan, entries: int, begun: asyncio.Event, running: asyncio.Future[list[Sampled]]
) -> int:
    """Change the schedule as long as requests run; how often that was."""
    running.add_done_callback(lambda _: begun.set())  # none that failed is waited for
    await begun.wait()
    done = 0
    for k in _changes(plan.k, plan.whole):
        if running.done():
            break
        await put_in_force(probe.engine, Schedule((k,) * entries))
        await schedule_state(probe.engine)  # a step more
        done += 1
    return done
