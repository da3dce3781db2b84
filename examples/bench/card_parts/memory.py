"""Part 5: the most memory at large batches, what a slice of draft training takes, and the phases of a refresh."""

from __future__ import annotations

import gc
import json
import math
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draft_training import (
    Document,
    DraftConfig,
    DraftTrainer,
    HiddenBuffer,
    TrainSettings,
    digest,
    fingerprint,
    load_draft,
)
from examples.bench import workload
from examples.bench.card_parts.probe import FLAG_PROBE, MIB, host_mib
from examples.bench.card_parts.record import Record
from examples.bench.card_parts.setup import Models, sizes_of
from examples.bench.common import spread, synchronize
from examples.bench.engines import EngineSettings, Remote

TOKENS = 24
#: how a sender may tell a worker what it sent
DIGESTS = {"sha256": digest, "fingerprint": fingerprint}
#: name -> dtype of the draft's parameters, precision of float32 products
PRECISIONS = {
    "float32": (torch.float32, "highest"),
    "TF32": (torch.float32, "high"),
    "bfloat16": (torch.bfloat16, "highest"),
}


def measure(record: Record, models: Models) -> None:
    """The engine first; it is closed before the draft is trained."""
    try:
        _engine(record, models)
    except RuntimeError as error:  # out of memory is an answer
        record.row(kind="engine lost", reason=str(error)[-2000:])
    _training(record, models)


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
    """Sender and worker, phase by phase, and then as the product does it in one call."""
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
        worker = {kind: engine.rpc("bench_refresh_phases", file, 7, told[kind]) for kind in DIGESTS}
    installs = {kind: spread(ms) for kind, ms in whole.items()}
    record.row(kind="refresh", megabytes=megabytes, sender_ms=spent, worker_ms=worker, install_ms=installs)


def _timed(spent: dict[str, float], name: str, device: str, call: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = call()
    synchronize(device)
    spent[name] = 1e3 * (time.perf_counter() - began)
    return result


def _training(record: Record, models: Models) -> None:
    sizes = sizes_of(record)
    cuda: bool = record.settings["cuda"]
    each: dict[str, float] = {}  # precision -> seconds of a token, as last measured
    for tokens in sizes.train_tokens:
        for name in PRECISIONS:
            if name == "TF32" and not cuda:
                continue
            expected = (
                1.5 * tokens * each.get(name, 0.0) * (1 + sizes.train_steps)
            )  # bfloat16 takes minutes on some CPUs
            if record.enough_for(20.0 + expected, f"draft training, {tokens} tokens, {name}"):
                try:
                    found = _slice(record, models, tokens, name)
                    each[name] = found["seconds"].median / tokens
                    record.row(kind="training", tokens=tokens, precision=name, **found)
                except torch.OutOfMemoryError as error:
                    record.row(kind="training", tokens=tokens, precision=name, out_of_memory=str(error)[:300])
                gc.collect()
                if cuda:
                    torch.cuda.empty_cache()


def _slice(record: Record, models: Models, tokens: int, precision: str) -> dict[str, Any]:
    """Steps of the trainer on documents of random numbers: the cost does not depend on them."""
    device, steps = "cuda" if record.settings["cuda"] else "cpu", sizes_of(record).train_steps
    hf = json.loads((models.target / "config.json").read_text())
    hf["max_position_embeddings"] = max(tokens, hf["max_position_embeddings"])
    config = DraftConfig.from_target(hf)
    dtype, _ = PRECISIONS[precision]
    with _products(precision):
        before = _memory(device, reset=True)
        trainer = DraftTrainer(config, TrainSettings(tokens_per_step=tokens), device=device, dtype=dtype, seed=0)
        own = getattr(torch, record.settings["dtype"])
        generator = torch.Generator().manual_seed(0)
        embed, head = (
            torch.randn(config.vocab_size, config.hidden_size, generator=generator).mul_(0.02).to(device, own)
            for _ in range(2)
        )
        trainer.update_policy(embed, head, 0)
        del embed, head
        buffer = HiddenBuffer(4 * tokens, 1 << 40, 0)
        for _ in range(2):
            buffer.add(_document(config, tokens, own, generator))
        ready = _memory(device)
        seconds = []
        for _ in range(1 + steps):
            report = trainer.train_slice(buffer, math.inf, 1)
            synchronize(device)
            seconds.append(report.seconds)
        after = _memory(device)
    return {
        "seconds": spread(seconds[1:]),
        "first_seconds": seconds[0],
        "tokens_in_step": report.tokens,
        "of": "card" if device == "cuda" else "host",
        "before_mib": before["now"],
        "ready_mib": ready["now"],  # weights, and the policy's embedding and head
        "between_steps_mib": after["now"],  # and the optimizer's state
        "peak_mib": after["peak"],
        "loss_finite": math.isfinite(report.loss),
    }


def _document(config: DraftConfig, tokens: int, dtype: torch.dtype, generator: torch.Generator) -> Document:
    states = len(config.aux_layers) * config.hidden_size
    return Document(
        input_ids=torch.randint(0, config.vocab_size, (tokens,), generator=generator),
        aux=torch.randn(tokens, states, generator=generator).to(dtype),
        last=torch.randn(tokens, config.hidden_size, generator=generator).to(dtype),
        loss_mask=torch.ones(tokens, dtype=torch.bool),
        policy_version=0,
    )


@contextmanager
def _products(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(PRECISIONS[precision][1])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _memory(device: str, reset: bool = False) -> dict[str, float]:
    """MiB now and at most; a host's most never falls."""
    if device == "cpu":
        return {"now": host_mib(), "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    torch.cuda.synchronize()
    found = {"now": torch.cuda.memory_allocated() / MIB, "peak": torch.cuda.max_memory_allocated() / MIB}
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return found
