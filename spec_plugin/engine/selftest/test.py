"""The start-up self-test: proves on the very engine that will roll out that its samples and log-probs are the target's.

Real engines have sampled wrongly without a word. Plain and speculating requests run side by side in the same batches
(``spec_plugin.engine.vllm.schedule.plain``) and must be alike:

``greedy``      at temperature 0 the same tokens, but for ties: as close as rounding, or what plain requests show among
                themselves, explains; a difference counts only if it shows again. Where steps of rollouts are full CUDA graphs, of
                speculating requests by themselves, too, since mixed batches run without them;
``states``      where the target keeps recurrent states, the same of long requests that come and go (see the module);
``samples``     at the run's own sampling options: log-probs are finite; token counts of both arms are of one distribution, and
                the speculating arm's of the stated one (``stats``); and log-probs agree with a teacher-forced recomputation, by
                plain requests of one token (the engine's ``prompt_logprobs`` are no evidence, vLLM issue 53488);
``switching``   counts once more, of requests under which k is switched and the draft is paused and goes on (see the module);
``break-even``  not a test: what a verification step costs against a plain step, for the controller (law 7).

What only a draft that is served can get wrong is tested before one is served for the first time; a run whose draft knows nothing
yet begins with ``greedy`` and ``break-even`` (``spec_plugin.api.events.SelfTestPart``).

Chance of rejecting a correct engine: ``alpha``, shared by the two tests under ``samples`` and that under ``switching``. The
other checks have tolerances for rounding (``verdicts.tolerance``), not error levels; with noise of 0.02 to 0.2 nats on every
logit, rounded to bfloat16 and not, ``greedy`` failed none of 160,000 simulated engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable

from spec_plugin.api.events import Check, SelfTestPart, SelfTestReport, StepTiming
from spec_plugin.engine.protocol import Engine
from spec_plugin.engine.selftest.probe import Probe, gather_or_cancel
from spec_plugin.engine.selftest.recurrent import states_stage
from spec_plugin.engine.selftest.self_test_plan import SelfTestPlan
from spec_plugin.engine.selftest.stages import greedy_stage, samples_stage
from spec_plugin.engine.selftest.switching import switching_stage
from spec_plugin.engine.vllm.schedule import channel

#: tokens that each request of the calibration makes, and rounds of all batch sizes; of a draft that knows nothing, which makes
#: one token a step, half as many in twice as many rounds: on a slow engine the second batch size was not begun, and what drafts
#: add to a step of four requests was taken for four times what they add to one
TIMED_TOKENS, TIMED_ROUNDS = 17, 3
TIMED_TOKENS_OF_NOTHING, TIMED_ROUNDS_OF_NOTHING = 10, 6
TIMED_UNTIL = 0.9  # share of the time after which no batch begins
#: and that there is in any case, of the seconds of the whole test, also in a part of it. With a quarter of that one of two batch
#: sizes of a run of TRL was not timed, and eight steps drafted 3 tokens where 6 were best
TIMED_LEAST = 0.4
RESTORE_S = 10.0  # seconds for giving the engine back


async def run_self_test(engine: Engine, plan: SelfTestPlan) -> SelfTestReport:
    """Test a running engine; never raises for what the engine does, every trouble is a failed check.

    Args:
        engine: built with the arguments of ``EngineFront.engine_arguments``; idle, with its draft not paused.
        plan: what is asked of it, and how long that may take.

    Returns:
        All checks in order. The schedule and the prefix cache are left as if nothing had happened.
    """
    sampling = dict(plan.sampling)
    if not sampling.get("temperature", 1.0):  # a greedy run: its distribution is what `greedy` tests
        sampling["temperature"] = 1.0
    probe = Probe(engine, sampling, plan.at_once, plan.adapter)
    checks: list[Check] = []
    steps: list[StepTiming] = []
    table: list[int] = []

    async def prepare() -> None:
        table.extend((await channel.schedule_state(engine))["table"])
        await channel.put_in_force(engine, plan.schedule(plan.k))

    async def collect(stage: AsyncIterator[Check]) -> None:
        async for check in stage:
            checks.append(check)

    if not (trouble := await _trouble("engine", prepare(), plan.limit)):
        stages = [("greedy", greedy_stage)]
        if plan.part is not SelfTestPart.START:
            # a hybrid model keeps states beside its cache of keys and values
            states = [("states", states_stage)] if engine.vllm_config.model_config.is_hybrid else []
            stages += [*states, ("samples", samples_stage), ("switching", switching_stage)]
        for name, stage in stages:
            left = probe.begun + plan.limit - time.perf_counter()
            checks += await _trouble(name, collect(stage(probe, plan)), plan.limit, left)
        if plan.part is not SelfTestPart.DRAFTS:
            trouble = await _trouble("break-even", collect(calibration(probe, plan, steps)), plan.limit)
    checks += [*trouble, *await _trouble("restore", restore(engine, table), RESTORE_S)]
    return SelfTestReport(tuple(checks), time.perf_counter() - probe.begun, tuple(steps))


async def _trouble(name: str, work: Awaitable[None], limit: float, left: float | None = None) -> list[Check]:
    """A failed check if the work fails, or needs more than the seconds that are ``left`` (None: all) of ``limit``; or nothing."""
    try:
        await asyncio.wait_for(work, limit if left is None else max(0.01, left))
    except asyncio.TimeoutError:
        return [Check(name, False, f"not finished within the time limit of {limit:g} s", out_of_time=True)]
    except Exception as error:
        return [Check(name, False, f"{type(error).__name__}: {error}")]
    return []


async def calibration(probe: Probe, plan: SelfTestPlan, steps: list[StepTiming]) -> AsyncIterator[Check]:
    """Time steps, as many as there is time for, into ``steps``; a check says what was found, and always passes."""
    await channel.take_steps(probe.engine)  # those of the checks: another k for each half of a batch
    deadline = plan.until(probe.begun, TIMED_UNTIL, TIMED_LEAST / plan.part.share)
    most = min(probe.begun + plan.limit, deadline + plan.seconds) - time.perf_counter()
    with contextlib.suppress(asyncio.TimeoutError):  # what was measured until then is kept
        await asyncio.wait_for(calibrate(probe, plan, deadline), max(0.01, most))
    steps += [t for t in await channel.take_steps(probe.engine) if t.alike]
    measured = SelfTestReport((), 0.0, tuple(steps)).break_even
    found = ", ".join(f"{b}: {v:.2f}" for b, v in measured.items()) or "nothing measured in time"
    yield Check("break-even", True, f"batch size: acceptance length: {found}")


async def calibrate(probe: Probe, plan: SelfTestPlan, deadline: float) -> None:
    """Decode at several batch sizes with each of ``plan.timed``: the engine's step log tells what that takes.

    All take turns, so that a busy moment of the machine meets all of them. With 0 the draft is paused, as it is when no batch
    size speculates, and once more with 0 it reads the text, as in the plain steps of a pair. Smallest and fullest batch first:
    beyond them nobody can guess. No batch begins after ``deadline``, of ``time.perf_counter()``.
    """
    begins, full = plan.part is SelfTestPart.START, min(plan.at_once, 128)
    params = probe.params(TIMED_TOKENS_OF_NOTHING if begins else TIMED_TOKENS, plain=False)
    rounds = TIMED_ROUNDS_OF_NOTHING if begins else TIMED_ROUNDS
    for batch in rounds * [*dict.fromkeys((1, full, *(b for b in (8, 32) if b < full)))]:
        if time.perf_counter() > deadline:
            return
        prompts = [plan.prompts[i % len(plan.prompts)] for i in range(batch)]
        for k, paused in [*((k, True) for k in plan.timed), (0, False)]:
            await channel.put_in_force(probe.engine, plan.schedule(k))
            if not paused:
                await channel.pause_idle_draft(probe.engine, False)
            await gather_or_cancel([probe.sample(0, prompt, params) for prompt in prompts])


async def restore(engine: Engine, table: list[int]) -> None:
    """Give the engine back with its own table (empty: it is not known) and a draft that is not paused, as it was."""
    if table:
        await channel.pause_idle_draft(engine, False)
        await channel.set_schedule(engine, table)
    await channel.take_steps(engine)  # the test's own are part of no rollout
    await engine.reset_prefix_cache()
