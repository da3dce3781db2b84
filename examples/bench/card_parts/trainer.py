"""Part 1: the actor's side, which needs no vLLM: hidden states, the training of a draft, and what a step of that takes."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from draft_training import Document, DraftConfig, DraftTrainer, HiddenBuffer, TrainSettings
from examples.bench import common
from examples.bench.card_parts.record import Record
from examples.bench.card_parts.setup import Models, sizes_of
from examples.bench.card_parts.smoke import REQUESTS, Items, Task, Wrong, run_group
from examples.bench.common import memory_mib, spread, synchronize

#: name -> dtype of the draft's parameters, precision of float32 products
PRECISIONS = {
    "float32": (torch.float32, "highest"),
    "TF32": (torch.float32, "high"),
    "bfloat16": (torch.bfloat16, "highest"),
}
#: rows of a profile
KERNELS = 10


def measure(record: Record, models: Models) -> None:
    """What runs, then how long a step of draft training takes and how much memory."""
    run_group(record, models, "actor and draft trainer", trainer_items)
    _training(record, models)


def trainer_items(pipe: Connection, task: Task) -> None:
    """(A process) What the flag does in the actor: hidden states, and the training of a draft on them."""
    common.prepare_process(task.settings["threads"])
    items = Items(pipe)
    device = "cuda" if task.settings["cuda"] else "cpu"
    hidden: list[Any] = []
    with items.item("the actor's hidden states") as seen:
        hidden.append(_harvested(seen, task, device))
    with items.item("attention of the draft's unroll in a fused kernel") as seen:
        _attention(seen, task, device)
    with items.item("training a draft, its copies in the host's memory between slices") as seen:
        _trained(seen, task, device, hidden)


def _harvested(seen: dict[str, Any], task: Task, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    from draft_training.config import default_aux_layers
    from examples.bench import harvest, workload
    from spec_plugin.trainer.decoder import find_decoder
    from spec_plugin.trainer.taps import Taps

    model: Any = AutoModelForCausalLM.from_pretrained(task.models.small, dtype=torch.float32).to(device).eval()
    prompts = workload.addition_prompts(task.models.small, REQUESTS, seed=9)
    width = min(map(len, prompts))
    ids = torch.tensor([prompt[:width] for prompt in prompts], device=device)
    taps = Taps.of(find_decoder(model), default_aux_layers(model.config.num_hidden_layers))
    with taps.attached(), torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    hidden = harvest.take(taps, ids)
    with torch.no_grad():
        again = model.lm_head(hidden.last.to(device))
    apart = float((again - logits.reshape(-1, logits.shape[-1])).abs().max())
    seen |= {"tokens": len(hidden.input_ids), "logits of the kept states apart": apart}
    if not apart < 1e-2:
        raise Wrong("the states that were kept are not those of the pass")
    return hidden, model


def _attention(seen: dict[str, Any], task: Task, device: str) -> None:
    from draft_training import load_draft
    from draft_training.attention import proven_kernel
    from draft_training.card import own_modes
    from draft_training.fused_attention import kernel_for

    where = torch.empty(0, device=device).device  # with its index, as a tensor says it
    head_dim = load_draft(task.models.draft)[0].head_dim
    for dtype in (torch.float32, torch.bfloat16):
        with own_modes(where):
            kernel = proven_kernel(where, dtype, head_dim)
        seen[str(dtype).removeprefix("torch.")] = "explicit scores" if kernel is None else kernel.name
        if kernel is None and kernel_for(where.type, dtype, head_dim):
            raise Wrong(
                f"{dtype}, heads of {head_dim}: the fused kernel is not right here, explicit scores serve (see the warning)"
            )


def _trained(seen: dict[str, Any], task: Task, device: str, hidden: list[Any]) -> None:
    from spec_plugin.policy.online_training import documents_of

    if not hidden:
        raise RuntimeError("there are no hidden states")
    states, model = hidden[0]
    config = DraftConfig.from_target(json.loads((Path(task.models.small) / "config.json").read_text()))
    trainer = DraftTrainer(config, replace(TrainSettings(), offload=True), device=device, seed=0)
    trainer.update_policy(model.get_input_embeddings().weight, model.lm_head.weight, 0)
    buffer = HiddenBuffer(1 << 20, 1 << 30, seed=0)
    for document in documents_of(states):
        buffer.add(document)
    first = trainer.train_slice(buffer, 60.0, 1)
    later = trainer.train_slice(buffer, 60.0, 20)
    seen |= {"steps": later.steps, "loss": f"{first.loss:.3f} to {later.loss:.3f}"}
    if not later.loss < first.loss:
        raise Wrong("its loss does not fall")


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
                    found, spent = _slice(record, models, tokens, name)
                    each[name] = found["seconds"].median / tokens
                    for row in spent:
                        record.row(kind="profile", tokens=tokens, precision=name, **row)
                    record.row(kind="training", tokens=tokens, precision=name, **found)
                except torch.OutOfMemoryError as error:
                    record.row(kind="training", tokens=tokens, precision=name, out_of_memory=str(error)[:300])
                gc.collect()
                if cuda:
                    torch.cuda.empty_cache()


def _slice(record: Record, models: Models, tokens: int, precision: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Steps of the trainer on documents of random numbers, on which the cost does not depend; and what one spends its time on."""
    device, steps = "cuda" if record.settings["cuda"] else "cpu", sizes_of(record).train_steps
    hf = json.loads((models.target / "config.json").read_text())
    hf["max_position_embeddings"] = max(tokens, hf["max_position_embeddings"])
    config = DraftConfig.from_target(hf)
    dtype, _ = PRECISIONS[precision]
    with _products(precision):
        before = memory_mib(device, reset=True)
        trainer = DraftTrainer(config, TrainSettings(tokens_per_step=tokens), device=device, dtype=dtype, seed=0)
        own = getattr(torch, record.settings["dtype"])
        generator = torch.Generator().manual_seed(0)
        embed, head = (
            torch.randn(config.vocab_size, config.hidden_size, device=device, dtype=own).mul_(0.02) for _ in range(2)
        )
        trainer.update_policy(embed, head, 0)
        del embed, head
        buffer = HiddenBuffer(4 * tokens, 1 << 40, 0)
        for _ in range(2):
            buffer.add(_document(config, tokens, own, generator))
        ready = memory_mib(device)
        seconds = []
        for _ in range(1 + steps):
            report = trainer.train_slice(buffer, math.inf, 1)
            synchronize(device)
            seconds.append(report.seconds)
        after = memory_mib(device)
        spent = _profile(device, lambda: trainer.train_slice(buffer, math.inf, 1))
    found = {
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
    return found, spent


def _profile(device: str, step: Callable[[], object]) -> list[dict[str, Any]]:
    """The kernels of one step on which most time is spent, in milliseconds and as a share of all; on a CPU its operators."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else []
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        synchronize(device)
    of = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    where = torch.autograd.DeviceType.CUDA if device == "cuda" else torch.autograd.DeviceType.CPU
    # an operator has the time of its kernels, too, which are rows of their own
    found = [event for event in profiler.key_averages() if event.device_type == where and not event.is_user_annotation]
    times = {event.key: float(getattr(event, of)) for event in found}
    every = sum(times.values()) or 1.0
    largest = sorted(times, key=lambda name: -times[name])[:KERNELS]
    return [{"kernel": name[:90], "ms": 1e-3 * times[name], "share": times[name] / every} for name in largest]


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
