"""Part 5: which share of a draft's pass its LM head takes, whole and pruned, and what drawing from it takes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from examples.bench import large
from examples.bench.card_parts.record import Record
from examples.bench.card_parts.setup import Models, sizes_of
from examples.bench.common import spread, synchronize, timed

#: a captured CUDA graph of a pass is replayed so often in one timing: what remains of starting it is a few microseconds
REPEATS = 20


def measure(record: Record, models: Models | None) -> None:
    """A row for each batch size and vocabulary: layers and head in turn."""
    sizes = sizes_of(record)
    device, dtype = "cuda" if record.settings["cuda"] else "cpu", getattr(torch, record.settings["dtype"])
    shape = large.SHAPES[sizes.shape]
    vocabularies = [shape.vocab_size, *(size for size in sizes.pruned if size < shape.vocab_size)]
    hidden, middle = shape.hidden_size, shape.intermediate_size
    weights = {
        name: torch.randn(size, device=device, dtype=dtype) / 100
        for name, size in {
            "qkv": (2 * hidden, (shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim),
            "o": (shape.num_attention_heads * shape.head_dim, hidden),
            "gate_up": (hidden, 2 * middle),
            "down": (middle, hidden),
            "head": (hidden, shape.vocab_size),
        }.items()
    }
    for batch, vocabulary in product(sizes.step_batches, vocabularies):
        if record.enough_for(10.0, f"batch {batch}, vocabulary {vocabulary}"):
            _row(record, sizes.rounds, weights, batch, vocabulary, device)


def _row(record: Record, rounds: int, weights: dict[str, Tensor], batch: int, vocabulary: int, device: str) -> None:
    hidden = weights["o"].shape[1]
    x = torch.randn(batch, hidden, device=device, dtype=weights["o"].dtype)
    both = torch.cat([x, x], dim=1)
    head = weights["head"][:, :vocabulary].contiguous()
    logits = (x @ head).float()

    def layer() -> (
        None
    ):  # the matrices of an EAGLE-3 layer: attention over the context, which grows with the text, is left out
        qkv = both @ weights["qkv"]
        out = qkv[:, : weights["o"].shape[0]] @ weights["o"]
        gate, up = (out @ weights["gate_up"]).chunk(2, dim=1)
        torch.mm(torch.nn.functional.silu(gate) * up, weights["down"])

    passes: dict[str, Callable[[], Any]] = {
        "layer": layer,
        "head": lambda: torch.mm(x, head),
        "greedy": lambda: logits.argmax(-1),
        "drawn": lambda: (logits.softmax(-1) / torch.empty_like(logits).exponential_()).argmax(-1),
    }
    runs = {name: _captured(call, device) for name, call in passes.items()}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(max(rounds, 3)):
        for name, run in runs.items():
            found[name].append(1e3 * timed(run, device).wall / REPEATS)
    ms = {name: spread(values) for name, values in found.items()}
    whole = ms["layer"].median + ms["head"].median
    record.row(
        kind="head",
        batch=batch,
        vocabulary=vocabulary,
        **{f"{name}_ms": values for name, values in ms.items()},
        head_share=ms["head"].median / whole,
        drawing_of_a_pass=(ms["drawn"].median - ms["greedy"].median) / (whole + ms["greedy"].median),
    )


def _captured(call: Callable[[], Any], device: str) -> Callable[[], None]:
    """What runs it ``REPEATS`` times: a CUDA graph on a card, as an engine's passes are."""

    def repeated() -> None:
        for _ in range(REPEATS):
            call()

    if device != "cuda":
        return repeated
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries take what they need before a graph is captured
        call()
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        repeated()
    return graph.replay
