"""Part 10: an engine whose weights are FP8, its draft in bfloat16: what runs, and what its steps take."""

from __future__ import annotations

from examples.bench import workload
from examples.bench.card_parts import start
from examples.bench.card_parts.record import Record
from examples.bench.card_parts.setup import Models, sizes_of
from examples.bench.card_parts.smoke import engine_items, run_group

FP8 = {"quantization": "fp8"}


def measure(record: Record, models: Models) -> None:
    """The items of the smoke, then steps of an engine without the flag and with it, in turn."""
    if not record.settings["cuda"]:
        record.note("left out: vLLM's CPU build serves no FP8")
        return
    run_group(record, models, "engine, FP8 weights", engine_items, engine=FP8)
    if record.enough_for(120.0, "steps of FP8 engines"):
        sizes = sizes_of(record)
        prompts = workload.addition_prompts(models.small, max(sizes.step_batches), seed=7)
        begun = {
            name: start.begin(record, models, kind, most, FP8)
            for name, kind, most in (("off", "plain", 0), ("flag", "flag", max(sizes.step_widths)))
        }
        engines = {name: start.ready(record, name, engine) for name, engine in begun.items()}
        start.steps(record, engines, prompts, False)
        for engine in engines.values():
            engine.close()
