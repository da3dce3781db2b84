"""Are samples the target's while k changes under running requests, and the draft is paused and goes on.

A rollout phase that is not empty when the next one begins meets all of that, and a step may lie between any two calls of the
control channel. What a step then verifies, and against which probabilities, is another question than whether it samples
rightly while nothing changes: vLLM's V2 runner hands out the rows of the last step that drafted while its draft is paused, and
a table that asked for drafts a step too early had 25 % of the policy's favourite tokens sampled in place of 85 %.

In each round requests leave such rows behind; the draft is paused; as many requests as fit begin without it, half of them
plain to their end; and once each has sampled a few tokens the tables of ``_changes`` come into force, one after the other,
with a step or more between them. The arms differ at the few positions that a switch falls on, which ``counts_check`` sees: on
that runner, with a draft that is always right and 32 requests at once, p was 5e-3 after correction with 64 sequences an arm, and
1e-4 with 192. So ``SEQUENCES`` are what it takes, and an engine that has time for fewer may pass with such a fault.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator

from spec_plugin.api.events import Check
from spec_plugin.engine.selftest.probe import Probe, gather_or_cancel
from spec_plugin.engine.selftest.self_test_plan import Sampled, SelfTestPlan
from spec_plugin.engine.selftest.verdicts import LEAST_SAMPLES, counts_check
from spec_plugin.engine.vllm.schedule.channel import put_in_force, schedule_state
from spec_plugin.engine.vllm.schedule.counters import read_spec_counters

SEQUENCES = 512  # in each arm, as far as there is time; on V1, whose draft never hands out old rows, LEAST_SAMPLES
BEGUN = 2  # tokens that a request has sampled when the tables begin to change
MORE = 10  # and so many behind that at least: a change takes effect within a few steps
LONGEST = 8  # times as many tokens, after rounds in which no change came while they ran
UNTIL, LEAST = 0.85, 0.25  # shares of the time: after which no round begins, and that the rounds have in any case
LATEST = 2.0  # and fewer than LEAST_SAMPLES are drawn only where the test has taken so many times its time


async def switching_stage(probe: Probe, plan: SelfTestPlan) -> AsyncIterator[Check]:
    """Rounds of samples under a changing schedule; afterwards all batch sizes draft ``plan.k`` again."""
    until = plan.until(probe.begun, UNTIL, LEAST)
    spec: list[Sampled] = []
    plain: list[Sampled] = []
    switches, drafts, longer = 0, 0, 1
    wanted = SEQUENCES if probe.engine.vllm_config.use_v2_model_runner else LEAST_SAMPLES
    for _ in range(math.ceil(wanted / len(plan.half_batch))):
        end = until if len(spec) >= LEAST_SAMPLES else probe.begun + LATEST * plan.seconds
        if spec and time.perf_counter() > end:
            break
        sampled, changes, verified = await _round(probe, plan, longer)
        spec += sampled[0::2]
        plain += sampled[1::2]
        switches += changes
        drafts += verified
        if not verified:  # requests ended before the schedule changed, on a machine that is busy with other things
            longer = min(LONGEST, 2 * longer)
    check = counts_check(spec, plain, plan.level, "samples: k switched")
    detail = (
        f"the schedule changed {switches} times under running requests, {drafts} drafts were verified; {check.detail}"
    )
    why = "" if drafts else "no draft came under running requests"
    if len(spec) < LEAST_SAMPLES:
        why = f"{len(spec)} sequences an arm where {LEAST_SAMPLES} would do"
    if why and (check.passed or check.out_of_time):  # nothing is wrong; that the engine drafts ``samples`` shows
        yield Check(check.name, True, f"unproven: {why}; {detail}", unproven=True)
    else:
        yield Check(check.name, check.passed, detail)


def _changes(k: int, whole: bool) -> tuple[int, ...]:
    """Tokens to draft, one after the other, for requests that began without; ``whole``: never less while some are in flight."""
    return (k,) if whole else (k, 0, k, 1, 0, k)


async def _round(probe: Probe, plan: SelfTestPlan, longer: int) -> tuple[list[Sampled], int, int]:
    """Both arms in turn, how often the schedule changed while they ran, and how many drafts were verified then.

    ``longer``: times as many tokens as a change should take.
    """
    engine, prompts = probe.engine, plan.half_batch
    await put_in_force(engine, plan.schedule(plan.k))
    short = probe.params(plan.k + 2, plain=False, logprobs=0)
    await gather_or_cancel([probe.sample(i, prompt, short) for i, prompt in prompts[::-1]])
    await put_in_force(engine, plan.schedule(0))

    before, begun = read_spec_counters()["drafts"], asyncio.Event()
    room = engine.vllm_config.model_config.max_model_len - max(len(prompt) for _, prompt in prompts) - 1
    least = BEGUN + MORE + 2 * plan.k
    length = min(longer * least, max(room, least))
    arms = [probe.params(length, plain, as_it_grows=True, logprobs=0) for plain in (False, True)]
    work = [probe.sample(i, prompt, params, (BEGUN, begun)) for i, prompt in prompts for params in arms]
    running = asyncio.ensure_future(gather_or_cancel(work))
    running.add_done_callback(lambda _: begun.set())  # none that failed is waited for
    changes = 0
    try:
        await begun.wait()
        for k in _changes(plan.k, plan.whole):
            if running.done():
                break
            await put_in_force(engine, plan.schedule(k))
            await schedule_state(engine)  # a step more
            changes += 1
        return await running, changes, read_spec_counters()["drafts"] - before
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await put_in_force(engine, plan.schedule(plan.k))
