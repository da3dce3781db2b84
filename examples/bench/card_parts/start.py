"""Part 1: what the engine is with the flag and without, seconds to start, and milliseconds of each kind of step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from examples.bench import workload
from examples.bench.card_parts.probe import FLAG_PROBE, PROBE
from examples.bench.card_parts.record import Record
from examples.bench.card_parts.setup import Models, sizes_of
from examples.bench.common import interleave, paired, spread
from examples.bench.engines import EngineSettings, Kind, Remote, Timing

#: k of the engine with vLLM's own speculation, whose k cannot change
STOCK_K = 3


def measure(record: Record, models: Models) -> None:
    """Start three engines, one after the other, and let them take steps in turn."""
    sizes = sizes_of(record)
    prompts = workload.addition_prompts(models.small, max(sizes.step_batches), seed=7)
    engines: dict[str, Remote] = {}
    for name, kind, k in (("off", "plain", 0), ("flag", "flag", max(sizes.step_widths)), ("stock", "stock", STOCK_K)):
        # the steps of all come last, and are what is wanted most
        if engines and not record.enough_for(150.0 if record.settings["cuda"] else 60.0, f"the engine {name!r}"):
            break
        try:
            engines[name] = _start(record, models, name, kind, k)
        except RuntimeError as error:  # an answer, too: the others go on
            record.row(kind="engine lost", engine=name, reason=str(error)[-2000:])
            if name == "off":
                raise
    for batch in sizes.step_batches:
        if record.enough_for(10.0, f"batch {batch}"):
            _steps(record, engines, prompts[:batch])
    for engine in engines.values():
        engine.close()


def _start(record: Record, models: Models, name: str, kind: Kind, k: int) -> Remote:
    sizes, settings = sizes_of(record), record.settings
    more = {"worker_extension_cls": FLAG_PROBE if kind == "flag" else PROBE}
    asked = EngineSettings(
        dtype=settings["dtype"],
        max_num_seqs=max(sizes.step_batches),
        memory_share=0.28,  # of three engines
        eager=settings["eager"],
        more=more,
    )
    engine = Remote(settings["threads"], kind, models.target, asked, models.draft, k).wait()
    facts = engine.rpc("bench_facts")
    memory = engine.rpc("bench_memory")
    record.row(kind="engine", engine=name, k=k, seconds_to_start=engine.start_seconds, **facts, memory_mib=memory)
    return engine


def _steps(record: Record, engines: dict[str, Remote], prompts: workload.Prompts) -> None:
    """All engines at one batch size."""
    sizes = sizes_of(record)
    arms: dict[str, Callable[[int], Timing]] = {}
    for name, engine in engines.items():
        if name == "flag":
            arms |= {f"flag k={k}": partial(_with_k, engine, k, prompts, sizes.tokens) for k in sizes.step_widths}
        else:
            label = "off" if name == "off" else f"stock k={STOCK_K}"
            arms[label] = partial(_round, engine, prompts, sizes.tokens)
    found = interleave(arms, sizes.rounds, 1, f"batch {len(prompts)}: {', '.join(arms)} in turn")
    steps = {arm: [t.step("wall") for t in timings] for arm, timings in found.items()}
    for arm, timings in found.items():
        record.row(
            kind="step",
            batch=len(prompts),
            arm=arm,
            ms=spread([1e3 * s for s in steps[arm]]),
            against_off=paired(steps[arm], steps["off"]),
            tokens_per_step=spread([t.acceptance_length for t in timings]).median,
            tokens_per_second=spread([t.rate("wall") for t in timings]),
        )


def _round(engine: Remote, prompts: workload.Prompts, tokens: int, _index: int) -> Timing:
    return engine.run(prompts, 1.0, tokens)


def _with_k(engine: Remote, k: int, prompts: workload.Prompts, tokens: int, index: int) -> Timing:
    engine.set_k(k)
    return _round(engine, prompts, tokens, index)
