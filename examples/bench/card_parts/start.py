"""Part 2: what the engine is with the flag and without, seconds to start, and milliseconds of each kind of step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file

from examples.bench import workload
from examples.bench.card_parts.probe import FLAG_PROBE, PROBE
from examples.bench.card_parts.record import Record
from examples.bench.card_parts.setup import Models, sizes_of
from examples.bench.common import interleave, paired, spread
from examples.bench.engines import EngineSettings, Kind, Remote, Timing
from spec_plugin.plan.model_runner import A_TRAINED_DRAFT, SWITCH, runner_of

#: k of the engine with vLLM's own speculation, whose k cannot change
STOCK_K = 3
#: the engine with the flag on the V1 model runner, where vLLM itself would take V2
V1 = "flag on V1"
#: of a DFlash draft, as those that are public have
ONE_PASS_LAYERS = 5


def measure(record: Record, models: Models) -> None:
    """Engines without the flag and with it, and beside them a third one at a time; what steps take, in turn."""
    sizes = sizes_of(record)
    prompts = workload.addition_prompts(models.small, max(sizes.step_batches), seed=7)
    seconds = 90.0 if record.settings["cuda"] else 60.0  # of a start
    off, flag = begin(record, models, "plain", 0), begin(record, models, "flag", max(sizes.step_widths))
    (name, start), *later = _others(record, models)
    third = start()  # all three start side by side
    engines = {"off": ready(record, "off", off)} | _started(record, "flag", flag)
    measured = _beside(record, engines, name, third, prompts, False)
    for name, start in later:
        if not record.enough_for(seconds + 30.0, f"the engine {name!r}"):
            break
        measured = _beside(record, engines, name, start(), prompts, measured)
    for engine in engines.values():
        engine.close()


def _beside(
    record: Record, engines: Mapping[str, Remote], name: str, begun: Remote, prompts: workload.Prompts, again: bool
) -> bool:
    """A third engine beside the first two, while it is measured; without it these alone, if they have no rows.

    Args:
        record: of the part.
        engines: the first two.
        name: of the third.
        begun: it, starting.
        prompts: as many as the largest batch.
        again: have the first two rows already.

    Returns:
        Whether they have now.
    """
    third = _started(record, name, begun)
    if third or not again:
        try:
            steps(record, {**engines, **third}, prompts, again)
            again = True
        except RuntimeError as error:
            record.row(kind="engine lost", engine=name, reason=str(error)[-2000:])
    begun.close()  # its place in the card's memory
    return again


def _others(record: Record, models: Models) -> Iterator[tuple[str, Callable[[], Remote]]]:
    """Engines that run beside the first two, the most wanted one first; a card has room for three."""
    most = max(sizes_of(record).step_widths)
    if record.settings["cuda"] and runner_of(A_TRAINED_DRAFT, "cuda").v2:
        yield V1, partial(begin, record, models, "flag", most, environment={SWITCH: "0"})
    yield "stock", partial(begin, record, models, "stock", STOCK_K)
    yield "one pass", partial(_one_pass, record, models, most)


def _started(record: Record, name: str, engine: Remote) -> dict[str, Remote]:
    """The engine by its name; nothing, and a row, if it does not start, which is an answer, too."""
    try:
        return {name: ready(record, name, engine)}
    except RuntimeError as error:
        record.row(kind="engine lost", engine=name, reason=str(error)[-2000:])
        return {}


def _one_pass(record: Record, models: Models, k: int) -> Remote:
    """Would a draft that proposes all tokens in one pass (DFlash) pay here: what its step costs, beside one that takes k passes.

    Its weights are noise, so nothing that it proposes is accepted: the milliseconds are the row, not the tokens.
    """
    folder = models.target.parent / "one-pass"
    method = {"method": "dflash", "model": str(_noise(folder, models.target, k)), "num_speculative_tokens": k}
    asked: dict[str, Any] = {"speculative_config": {**method, "draft_load_config": {"load_format": "dummy"}}}
    if not record.settings["cuda"]:  # vLLM's CPU build packs weights away otherwise, and this draft reads some
        asked["worker_extension_cls"] = FLAG_PROBE
    return begin(record, models, "stock", k, asked)


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
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"fc.weight": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def begin(
    record: Record,
    models: Models,
    kind: Kind,
    k: int,
    arguments: Mapping[str, Any] | None = None,
    spec: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Remote:
    """Begin to start an engine of this part's sizes; three fit on a card."""
    sizes, settings = sizes_of(record), record.settings
    more = {"worker_extension_cls": FLAG_PROBE if kind == "flag" else PROBE, **(arguments or {})}
    asked = EngineSettings(
        dtype=settings["dtype"],
        max_num_seqs=max(sizes.step_batches),
        memory_share=0.28,  # of three engines
        kv_gib=3.0 if settings["cuda"] else None,
        eager=settings["eager"],
        more=more,
    )
    return Remote(settings["threads"], kind, models.target, asked, models.draft, k, spec, environment=environment)


def ready(record: Record, name: str, engine: Remote) -> Remote:
    """The engine once it has started, with a row that says what it came to be."""
    engine.wait()
    facts = engine.rpc("bench_facts")
    memory = engine.rpc("bench_memory")
    record.row(kind="engine", engine=name, seconds_to_start=engine.start_seconds, **facts, memory_mib=memory)
    return engine


def steps(record: Record, engines: Mapping[str, Remote], prompts: workload.Prompts, again: bool) -> None:
    """All engines in turn, at each batch size.

    Args:
        record: of the part.
        engines: by name; ``off`` is among them.
        prompts: as many as the largest batch.
        again: those of ``off`` and ``flag`` have rows already: they run along for the comparison, the latter with its largest k.
    """
    sizes = sizes_of(record)
    for batch in sizes.step_batches:
        if not record.enough_for(10.0, f"batch {batch}"):
            return
        given, arms = prompts[:batch], {}
        for name, engine in engines.items():
            if name in ("flag", V1):
                widths = sizes.step_widths[-1:] if again and name == "flag" else sizes.step_widths
                arms |= {f"{name} k={k}": partial(_with_k, engine, k, given, sizes.tokens) for k in widths}
            else:
                label = {"off": "off", "stock": f"stock k={STOCK_K}"}.get(name, f"{name} k={sizes.step_widths[-1]}")
                arms[label] = partial(_round, engine, given, sizes.tokens)
        _in_turn(record, arms, batch, again)


def _in_turn(record: Record, arms: Mapping[str, Callable[[int], Timing]], batch: int, again: bool) -> None:
    """A row for each arm at one batch size, ``off`` among them."""
    found = interleave(arms, sizes_of(record).rounds, 1, f"batch {batch}: {', '.join(arms)} in turn")
    seconds = {arm: [t.step("wall") for t in timings] for arm, timings in found.items()}
    for arm, timings in found.items():
        if again and arm.startswith(("off", "flag k=")):
            continue
        record.row(
            kind="step",
            batch=batch,
            arm=arm,
            ms=spread([1e3 * s for s in seconds[arm]]),
            mean_ms=spread([1e3 * t.mean_step("wall") for t in timings]),
            prefill_ms=spread([1e3 * t.prefill("wall") for t in timings]),
            against_off=paired(seconds[arm], seconds["off"]),
            tokens_per_step=spread([t.acceptance_length for t in timings]).median,
            tokens_per_second=spread([t.rate("wall") for t in timings]),
        )


def _round(engine: Remote, prompts: workload.Prompts, tokens: int, _index: int) -> Timing:
    return engine.run(prompts, 1.0, tokens)


def _with_k(engine: Remote, k: int, prompts: workload.Prompts, tokens: int, index: int) -> Timing:
    engine.set_k(k)
    return _round(engine, prompts, tokens, index)
