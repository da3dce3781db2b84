"""Part 5: what the draft is after the engine slept, and whether it can be served again: cycles of sleep, wake-up and refresh."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform

from examples.bench import workload
from examples.bench.card_parts.probe import DRAFT_IDS, FLAG_PROBE, names_of
from examples.bench.card_parts.record import Record
from examples.bench.card_parts.setup import Models, sizes_of
from examples.bench.engines import EngineSettings, Remote

TOKENS = 32
#: level -> share of the cycles, and share of the part's time that is kept for the next level
LEVELS = {2: (1.0, 0.4), 1: (0.25, 0.0)}


def measure(record: Record, models: Models) -> None:
    """Level 2, the trainer's, and level 1, ours: each on an engine of its own, since one may take its engine down."""
    can_sleep = bool(current_platform.is_sleep_mode_available())
    if not can_sleep:
        record.note(
            "this vLLM has no sleep mode: the calls are made and do nothing, so that the rest of the part is tried"
        )
    whole = record.left()
    for level, (cycles, kept) in LEVELS.items():
        if not record.enough_for(90.0 if record.settings["cuda"] else 30.0, f"sleep level {level}"):
            return
        try:
            _cycles(record, models, level, can_sleep, math.ceil(cycles * sizes_of(record).sleeps), kept * whole)
        except RuntimeError as error:  # an engine that is gone is what this part looks for
            record.row(kind="engine lost", level=level, reason=str(error)[-2000:])


def _cycles(record: Record, models: Models, level: int, can_sleep: bool, cycles: int, kept: float) -> None:
    sizes, settings = sizes_of(record), record.settings
    more = {"worker_extension_cls": FLAG_PROBE, "enable_sleep_mode": can_sleep}
    asked = EngineSettings(
        dtype=settings["dtype"], max_num_seqs=sizes.sleep_requests, eager=settings["eager"], memory_share=0.6, more=more
    )
    engine = Remote(settings["threads"], "flag", models.target, asked, models.draft, settings["k"]).wait()
    try:
        prompts = workload.addition_prompts(models.small, sizes.sleep_requests, seed=23)
        engine.set_k(settings["k"])
        engine.rpc("spec_look_at_draft")  # remembers what a whole draft looks like
        engine.run(prompts, 0.0, TOKENS)
        reference = engine.run(prompts, 0.0, TOKENS)
        engine.rpc("bench_keep_target")
        whole = engine.rpc("bench_draft_tensors")
        record.row(
            kind="before", level=level, acceptance_length=reference.acceptance_length, tensors=whole, slept=can_sleep
        )
        for cycle in range(cycles):
            if not record.enough_for(kept + 15.0, f"level {level}, cycles from {cycle} on"):
                break
            _cycle(record, engine, models, level, cycle, prompts, reference.outputs, whole)
    finally:
        engine.close()


def _cycle(
    record: Record,
    engine: Remote,
    models: Models,
    level: int,
    cycle: int,
    prompts: workload.Prompts,
    expected: list[list[int]],
    whole: dict[str, dict[str, Any]],
) -> None:
    """As verl does it: weights, sync, refresh, then the KV cache."""
    (file,) = Path(models.draft).glob("*.safetensors")
    spent: dict[str, float] = {}
    _timed(spent, "sleep", lambda: engine.sleep(level))
    asleep = engine.rpc("bench_memory")
    _timed(spent, "wake weights", lambda: engine.wake_up("weights"))
    woken = engine.rpc("bench_draft_tensors")
    lost = engine.rpc("bench_lost_draft")
    if level == 2:
        _timed(spent, "sync", lambda: engine.rpc("bench_restore_target"))
    _timed(spent, "refresh", lambda: engine.install(file, version=1 + cycle))
    refreshed = engine.rpc("bench_draft_tensors")
    _timed(spent, "wake KV cache", lambda: engine.wake_up("kv_cache"))
    found = engine.run(prompts, 0.0, TOKENS)
    same = sum(a == b for a, b in zip(found.outputs, expected, strict=True))
    record.row(
        kind="cycle",
        level=level,
        cycle=cycle,
        lost_draft=lost,
        ids_after_wake=_ids(woken),
        ids_after_refresh=_ids(refreshed),
        identical=same,
        requests=len(prompts),
        acceptance_length=found.acceptance_length,
        seconds=spent,
        asleep_mib=asleep,
        changed_by_sleep=[name for name, about in whole.items() if woken.get(name) != about],
        not_restored=[name for name, about in whole.items() if refreshed.get(name) != about],
    )


def _ids(tensors: dict[str, dict[str, Any]]) -> int | None:
    """How many entries of ``draft_id_to_target_id`` are not zero (an unpruned draft's must all be); None: there is none."""
    found = [tensors[name]["nonzero"] for name in names_of(tensors, DRAFT_IDS)]
    return int(sum(found)) if found else None


def _timed(spent: dict[str, float], name: str, call: Callable[[], object]) -> None:
    began = time.perf_counter()
    call()
    spent[name] = time.perf_counter() - began
