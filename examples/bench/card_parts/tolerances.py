"""Part 4: how far two correct computations of one model are apart, and what our own guards would have said.

The text is a small policy's, embedded in a large shape: most of the numbers that are added up are zeros, which round to nothing.
So the differences are those of a large model's kernels on a small model's numbers, and smaller than a trained 8B's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoTokenizer
from vllm import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from examples.bench.card_parts.compare import compare_greedy, judge, logprob_row
from examples.bench.card_parts.record import Record
from examples.bench.card_parts.score import Scorer
from examples.bench.card_parts.setup import Models, Sizes, mixed_prompts, sizes_of
from examples.bench.engines import EXTENSION, EngineSettings, describe, engine_options, flag_front
from spec_plugin.api.events import Schedule
from spec_plugin.engine.front import EngineFront
from spec_plugin.engine.selftest.probe import TOP, Probe, gather_or_cancel
from spec_plugin.engine.selftest.self_test_plan import Sampled

TEMPERATURES = (1.0, 0.6)
GREEDY_TOKENS = 48
#: requests at once, of the drafted-against-plain and plain-against-plain comparisons; None: all
GREEDY_SHAPES: tuple[int | None, ...] = (None, 32, 8, 2)
MAX_NUM_SEQS = 256
#: share of the part's time after which nothing more is sampled: the rest is for the comparison with HF
SAMPLED_UNTIL = 0.55

Arm = tuple[float, str]  # temperature, "plain" or "drafted"


def measure(record: Record, models: Models) -> None:
    """Sample in the engine, end it, and compute the same with transformers."""
    samples, prompts = asyncio.run(_in_engine(record, models))
    device = "cuda" if record.settings["cuda"] else "cpu"
    scorer = Scorer(models.target, record.settings["dtype"], device)
    batches: dict[Arm, list[tuple[list[list[float]], list[list[float]]]]] = {}
    for arm, sampled in samples.items():
        began, stated, scored = time.monotonic(), [], []
        for begin in range(0, len(sampled), 256):
            if not record.enough_for(20.0, f"HF log-probs of {arm} from sequence {begin} on"):
                break
            part = sampled[begin : begin + 256]
            scored += scorer.score([(prompts[s.prompt], list(s.tokens)) for s in part], arm[0])
            stated += [s.logprobs.tolist() for s in part]
        if stated:
            seconds = time.monotonic() - began
            record.row(kind="log-probs", temperature=arm[0], arm=arm[1], **logprob_row(stated, scored), seconds=seconds)
            batches[arm] = [(stated, scored)]
    for temperature in TEMPERATURES:
        pairs = {name: batches[temperature, name][0] for name in ("plain", "drafted") if (temperature, name) in batches}
        if len(pairs) == 2:
            target = describe(models.target, record.settings["dtype"], MAX_NUM_SEQS, {"temperature": temperature})
            for row in judge(target, pairs["plain"], pairs["drafted"]):
                record.row(kind="guard", temperature=temperature, **row)


async def _in_engine(record: Record, models: Models) -> tuple[dict[Arm, list[Sampled]], list[list[int]]]:
    sizes, settings = sizes_of(record), record.settings
    seqs = MAX_NUM_SEQS if settings["cuda"] else 16
    front, engine = _start(record, models, seqs)
    total = record.left()
    try:
        prompts = mixed_prompts(models.small, sizes.seeds, seed=11)
        await _greedy(record, front, prompts, seqs)
        report = await front.self_test(sizes.self_test_seconds)
        checks = [vars(check) for check in report.checks]
        record.row(kind="self-test", passed=report.passed, seconds=report.seconds, checks=checks)
        samples: dict[Arm, list[Sampled]] = {}
        arms = [(temperature, name) for temperature in TEMPERATURES for name in ("plain", "drafted")]
        until = record.left() - (SAMPLED_UNTIL * total - (total - record.left()))
        for i, arm in enumerate(arms):
            share = (record.left() - until) / (len(arms) - i)
            samples[arm] = await _sample(record, front, prompts, arm, sizes, seqs, record.left() - share)
        return samples, prompts
    finally:
        engine.shutdown()


def _start(record: Record, models: Models, seqs: int) -> tuple[EngineFront, Any]:
    settings = record.settings
    asked = EngineSettings(dtype=settings["dtype"], max_num_seqs=seqs, eager=settings["eager"], memory_share=0.6)
    given = engine_options(asked)
    if not settings["cuda"]:
        given["distributed_executor_backend"] = "uni"  # a worker in a process of its own spins while it waits
    target = describe(models.target, settings["dtype"], seqs, {"temperature": 1.0})
    front = flag_front(target, models.draft, settings["k"], AutoTokenizer.from_pretrained(models.target))
    arguments = {**given, **front.engine_arguments(given, EXTENSION)}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(models.target), **arguments))
    front.engine = engine
    return front, engine


async def _greedy(record: Record, front: EngineFront, prompts: Sequence[list[int]], seqs: int) -> None:
    """The same prompts drafted and plain, so many at a time."""
    k = record.settings["k"]
    probe = Probe(front.engine, {"temperature": 0.0}, seqs)
    arms: dict[str, list[Sampled]] = {}
    for size in [size for size in GREEDY_SHAPES if size is None or size < len(prompts)]:
        for name, width in (("plain", 0), ("drafted", k)):
            await front.set_schedule(Schedule((width,) * (seqs + 1)))
            at_once = min(size or len(prompts), seqs)
            label = f"{name} {at_once} at once"
            if not record.enough_for(15.0, f"greedy, {label}"):
                continue
            arms[label] = await _groups(probe, prompts, at_once, GREEDY_TOKENS, logprobs=TOP)
    dtype = getattr(torch, record.settings["dtype"])
    for row in compare_greedy(arms, dtype):
        record.row(kind="greedy", **row)


async def _groups(
    probe: Probe, prompts: Sequence[list[int]], at_once: int, tokens: int, **options: Any
) -> list[Sampled]:
    params = probe.params(tokens, plain=False, **options)
    found: list[Sampled] = []
    for begin in range(0, len(prompts), at_once):
        part = range(begin, min(begin + at_once, len(prompts)))
        found += await gather_or_cancel([probe.sample(i, prompts[i], params) for i in part])
    return found


async def _sample(
    record: Record,
    front: EngineFront,
    prompts: Sequence[list[int]],
    arm: Arm,
    sizes: Sizes,
    seqs: int,
    until: float,
) -> list[Sampled]:
    """Text of one arm, with the engine's log-probs; in rounds of ``seqs`` requests, until ``record.left()`` is ``until``."""
    temperature, name = arm
    width = record.settings["k"] if name == "drafted" else 0
    await front.set_schedule(Schedule((width,) * (seqs + 1)))
    probe = Probe(front.engine, {"temperature": temperature}, seqs)
    found: list[Sampled] = []
    began, tokens, index = time.monotonic(), 0, 0
    while tokens < sizes.scored and (not found or record.left() > until):
        work = []
        for _ in range(seqs):
            params = probe.params(sizes.lengths[index % len(sizes.lengths)], plain=False, logprobs=0)
            place = index // len(sizes.lengths) % len(prompts)
            work.append(probe.sample(place, prompts[place], params))
            index += 1
        found += await gather_or_cancel(work)
        tokens = sum(len(s.tokens) for s in found)
    record.row(kind="sampled", temperature=temperature, arm=name, tokens=tokens, seconds=time.monotonic() - began)
    return found
