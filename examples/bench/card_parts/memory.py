"""Part 6: the most memory at large batches, and what a refresh takes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draft_training import DraftTrainer, TrainSettings, digest, fingerprint, load_draft
from examples.bench import workload
from examples.bench.card_parts.probe import FLAG_PROBE
from examples.bench.card_parts.record import Record
from examples.bench.card_parts.setup import Models, sizes_of
from examples.bench.common import spread, synchronize
from examples.bench.engines import EngineSettings, Remote

TOKENS = 24
#: how a sender may tell a worker what it sent
DIGESTS = {"sha256": digest, "fingerprint": fingerprint}


def measure(record: Record, models: Models) -> None:
    """One engine with the flag."""
    try:
        _engine(record, models)
    except RuntimeError as error:  # out of memory is an answer
        record.row(kind="engine lost", reason=str(error)[-2000:])


def _engine(record: Record, models: Models) -> None:
    sizes, settings = sizes_of(record), record.settings
    asked = EngineSettings(
        dtype=settings["dtype"],
        max_num_seqs=max(sizes.peak_batches),
        eager=settings["eager"],
        memory_share=0.6,
        more={"worker_extension_cls": FLAG_PROBE},
    )
    engine = Remote(settings["threads"], "flag", models.target, asked, models.draft, settings["k"]).wait()
    try:
        _refresh(record, engine, models)
        prompts = workload.addition_prompts(models.small, max(sizes.peak_batches), seed=31)
        for batch in sizes.peak_batches:
            for k in (0, settings["k"]):
                if record.enough_for(15.0, f"peak memory at batch {batch}, k={k}"):
                    _peak(record, engine, prompts[:batch], k)
    finally:
        engine.close()


def _peak(record: Record, engine: Remote, prompts: workload.Prompts, k: int) -> None:
    """With the log-prob of each token, as trainers ask for."""
    engine.set_k(k)
    before = engine.rpc("bench_memory", reset=True)
    timing = engine.run(prompts, 1.0, TOKENS)
    after = engine.rpc("bench_memory")
    record.row(
        kind="peak",
        batch=len(prompts),
        k=k,
        of="card" if record.settings["cuda"] else "host",
        idle_mib=before["now"],
        peak_mib=after["peak"],
        above_idle_mib=after["peak"] - before["now"],
        memory=after,
        tokens_per_second=timing.rate("wall"),
    )


def _refresh(record: Record, engine: Remote, models: Models) -> None:
    """The sender, phase by phase, and the worker in one call, as in a run."""
    device = "cuda" if record.settings["cuda"] else "cpu"
    config, tensors = load_draft(models.draft)
    trainer = DraftTrainer(config, TrainSettings(), device=device, seed=0, tensors=tensors)
    spent: dict[str, float] = {}
    dtype = getattr(torch, record.settings["dtype"])
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        file = str(Path(folder) / "draft.safetensors")
        sent = _timed(spent, "copy out of the trainer", device, lambda: trainer.engine_tensors(dtype))
        told = {kind: _timed(spent, kind, device, partial(made, sent)) for kind, made in DIGESTS.items()}
        _timed(spent, "write file", device, lambda: save_file({n: t.cpu().contiguous() for n, t in sent.items()}, file))
        megabytes = sum(t.nbytes for t in sent.values()) / 1e6
        whole: dict[str, list[float]] = {kind: [] for kind in DIGESTS}
        for version, kind in enumerate(list(DIGESTS) * 3, start=1):
            began = time.perf_counter()
            report = engine.rpc("spec_install_file", path=file, version=version, digest=told[kind], names=list(sent))
            whole[kind].append(1e3 * (time.perf_counter() - began))
            if not report["installed"]:
                record.row(kind="refresh refused", reason=report["reason"])
                return
    installs = {kind: spread(ms) for kind, ms in whole.items()}
    record.row(kind="refresh", megabytes=megabytes, sender_ms=spent, install_ms=installs)


def _timed(spent: dict[str, float], name: str, device: str, call: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = call()
    synchronize(device)
    spent[name] = 1e3 * (time.perf_counter() - began)
    return result
