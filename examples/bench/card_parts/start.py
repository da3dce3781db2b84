"""Part 1: what the engine is with the flag and without, seconds to start, and milliseconds of each kind of step."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from examples.bench import workload
from examples.bench.card_parts.probe import FLAG_PROBE, PROBE
from examples.bench.card_parts.record import Record
from examples.bench.card_parts.setup import Models, sizes_of
from examples.bench.common import interleave, paired, spread
from examples.bench.engines import EngineSettings, Kind, Remote, Timing

#: k of the engine with vLLM's own speculation, whose k cannot change
STOCK_K = 3
#: of a DFlash draft, as those that are public have
ONE_PASS_LAYERS = 5


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
    if "stock" in engines and record.enough_for(150.0 if record.settings["cuda"] else 60.0, "a draft of one pass"):
        engines.pop("stock").close()  # its place in the card's memory
        try:
            _one_pass(record, models, engines, prompts)
        except RuntimeError as error:
            record.row(kind="engine lost", engine="one pass", reason=str(error)[-2000:])
    for engine in engines.values():
        engine.close()


def _one_pass(record: Record, models: Models, engines: Mapping[str, Remote], prompts: workload.Prompts) -> None:
    """Would a draft that proposes all tokens in one pass (DFlash) pay here: what its step costs, beside one that takes k passes.

    Its weights are noise, so nothing that it proposes is accepted: the milliseconds are the row, not the tokens.
    """
    sizes = sizes_of(record)
    k = max(sizes.step_widths)
    with tempfile.TemporaryDirectory() as folder:
        method = {"method": "dflash", "model": str(_noise(Path(folder), models.target, k)), "num_speculative_tokens": k}
        asked = {"speculative_config": {**method, "draft_load_config": {"load_format": "dummy"}}}
        engine = _start(record, models, "one pass", "stock", k, asked)
    try:
        for batch in sizes.step_batches:
            if record.enough_for(10.0, f"one pass, batch {batch}"):
                given = prompts[:batch]
                arms: dict[str, Callable[[int], Timing]] = {"off": partial(_round, engines["off"], given, sizes.tokens)}
                arms[f"flag k={k}, again"] = partial(_with_k, engines["flag"], k, given, sizes.tokens)
                arms[f"one pass k={k}"] = partial(_round, engine, given, sizes.tokens)
                _in_turn(record, arms, batch, leave_out=("off",))
    finally:
        engine.close()


def _noise(folder: Path, target: Path, k: int) -> Path:
    """The folder of a DFlash draft of five layers in the target's shape, whose weights vLLM makes up."""
    hf = json.loads((target / "config.json").read_text())
    layers = hf["num_hidden_layers"]
    config = {name: value for name, value in hf.items() if name not in ("layer_types", "max_window_layers")} | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": ONE_PASS_LAYERS,
        "layer_types": ["full_attention"] * ONE_PASS_LAYERS,
        "num_target_layers": layers,
        "block_size": k + 1,
        "dflash_config": {
            "target_layer_ids": [1, layers // 2 - 1, layers - 4],  # those that EAGLE-3 reads
            "mask_token_id": hf["vocab_size"] - 1,
            "use_aux_hidden_state": True,
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"fc.weight": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def _start(
    record: Record, models: Models, name: str, kind: Kind, k: int, arguments: Mapping[str, Any] | None = None
) -> Remote:
    sizes, settings = sizes_of(record), record.settings
    more = {"worker_extension_cls": FLAG_PROBE if kind == "flag" else PROBE, **(arguments or {})}
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
    _in_turn(record, arms, len(prompts))


def _in_turn(
    record: Record, arms: Mapping[str, Callable[[int], Timing]], batch: int, leave_out: Sequence[str] = ()
) -> None:
    """A row for each arm at one batch size, ``off`` among them; ``leave_out``: of these there is one already."""
    found = interleave(arms, sizes_of(record).rounds, 1, f"batch {batch}: {', '.join(arms)} in turn")
    steps = {arm: [t.step("wall") for t in timings] for arm, timings in found.items()}
    for arm, timings in found.items():
        if arm in leave_out:
            continue
        record.row(
            kind="step",
            batch=batch,
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
