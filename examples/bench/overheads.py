"""What the plugin adds to a step besides drafting, as the sizes grow: harvest, draft training, refresh, provenance, memory."""

from __future__ import annotations

import math
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from spec_plugin_conformance.tiny import tiny_config  # noqa: E402

from draft_training import DraftConfig, DraftTrainer, HiddenBuffer, TrainSettings, digest  # noqa: E402
from examples.bench import common  # noqa: E402
from examples.bench.common import show, track  # noqa: E402
from spec_plugin.api.config import SpecConfig  # noqa: E402
from spec_plugin.api.events import Drafts, LogprobBatch, TargetInfo  # noqa: E402
from spec_plugin.policy.online_training import documents_of  # noqa: E402
from spec_plugin.policy.provenance import ProvenanceGuard  # noqa: E402
from spec_plugin.trainer.decoder import find_decoder  # noqa: E402
from spec_plugin.trainer.harvest import harvested, responses_at_the_end  # noqa: E402
from spec_plugin.trainer.harvest_plan import HarvestPlan  # noqa: E402
from spec_plugin.trainer.taps import Taps  # noqa: E402

HELP = """Measure what harvest, draft training, refresh and provenance cost, at growing hidden size, vocabulary and length.

\b
One size grows at a time, from --hidden 128, vocabulary 2048, 16 documents of 64 tokens. For each:
  harvest      copying auxiliary hidden states out of a forward pass that runs anyway
  training     one optimizer step of the draft on all tokens
  refresh      the draft's tensors in the engine's dtype, and their digest
  provenance   checking the log-probs of all tokens
The last column says how cost grew for each doubling of the size: 2.0 is linear.
"""


@dataclass(frozen=True)
class Size:
    """One point."""

    hidden: int = 128
    vocabulary: int = 2048
    documents: int = 16
    length: int = 64


@dataclass(frozen=True)
class Cost:
    """Milliseconds, medians; and what the draft keeps in memory, in MiB."""

    size: Size
    harvest: float
    training: float
    refresh: float
    provenance: float
    draft_mb: float
    buffer_mb: float
    peak_mb: float  # of this process so far


SERIES = {
    "hidden": [Size(hidden=h) for h in (128, 256, 512)],
    "vocabulary": [Size(vocabulary=v) for v in (2048, 8192, 32768)],
    "length": [Size(length=n) for n in (64, 128, 256, 512)],
    "documents": [Size(documents=n) for n in (16, 32, 64, 128)],
}
PARTS = ("harvest", "training", "refresh", "provenance")


@click.command(help=HELP, context_settings={"max_content_width": 120, "show_default": True})
@click.option("--rounds", default=5, help="Rounds that count; one more warms up.")
@click.option("--device", default="auto", help="Where.")
@click.option("--threads", type=int, help="Compute threads; default: all cores.")
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of JSON and PNG.")
def main(rounds: int, device: str, threads: int | None, out: Path) -> None:
    """Measure and report."""
    common.prepare_process(threads)
    device = common.pick_device(device)
    where = common.environment(device)
    results = {name: [measure(s, rounds, device) for s in track(sizes, name)] for name, sizes in SERIES.items()}
    for name, costs in results.items():
        report(name, costs)
    file = common.write_results("overheads", {"rounds": rounds, "device": device}, results, where, out)
    write_picture(results, file.with_suffix(".png"))
    common.say(f"picture: {file.with_suffix('.png')}")


def measure(size: Size, rounds: int, device: str) -> Cost:
    """All parts at one size."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    heads = size.hidden // 32
    config = tiny_config(
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        vocab_size=size.vocabulary,
        num_attention_heads=heads,
    )
    config.max_position_embeddings = 1024
    model = Qwen3ForCausalLM(config).to(device).eval()
    draft = DraftConfig.from_target(config.to_dict())
    trainer = DraftTrainer(draft, TrainSettings(tokens_per_step=size.documents * size.length), device=device, seed=0)
    trainer.update_policy(model.get_input_embeddings().weight, model.get_output_embeddings().weight, 0)
    ids = [torch.randint(size.vocabulary, (size.length,)) for _ in range(size.documents)]
    masks = responses_at_the_end(ids, [size.length // 2] * size.documents)
    taps = Taps.of(find_decoder(model), draft.aux_layers)
    with torch.no_grad(), taps.attached():
        model.model(input_ids=torch.stack(ids).to(device), use_cache=False)
    captured = taps.states()
    buffer = HiddenBuffer(1 << 30, 1 << 40, 0)

    def harvest() -> Any:
        taps._seen = dict(captured)  # the pass itself is the trainer's
        return harvested(taps, (ids, masks), HarvestPlan(1 << 30))

    for document in documents_of(harvest()):
        buffer.add(document)
    tensors = trainer.engine_tensors(torch.bfloat16)
    buffered = sum(t.numel() * t.element_size() for d in documents_of(harvest()) for t in (d.aux, d.last))
    return Cost(
        size,
        harvest=_ms(harvest, rounds, device),
        training=_ms(lambda: trainer.train_slice(buffer, math.inf, 1), rounds, device),
        refresh=_ms(lambda: digest(trainer.engine_tensors(torch.bfloat16)), rounds, device),
        provenance=_ms(_provenance(size), rounds, device),
        draft_mb=sum(t.numel() * t.element_size() for t in tensors.values()) / 2**20,
        buffer_mb=buffered / 2**20,
        peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def _provenance(size: Size) -> Callable[[], None]:
    guard = ProvenanceGuard()
    guard.spec_configure(
        config=SpecConfig.parse({}), target=TargetInfo("", {"vocab_size": size.vocabulary}, "bfloat16")
    )
    recomputed = -torch.rand(size.documents, size.length)
    mask = torch.ones_like(recomputed, dtype=torch.bool)
    drafted = torch.full(mask.shape, Drafts.ON)
    batch = LogprobBatch(0, recomputed, recomputed.clone(), mask, torch.zeros(mask.shape), drafted, False)
    return lambda: guard.spec_check_logprobs(batch=batch)


def _ms(call: Callable[[], Any], rounds: int, device: str) -> float:
    call()
    times = []
    for _ in range(rounds):
        common.synchronize(device)
        began = time.perf_counter()
        call()
        common.synchronize(device)
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def growth(name: str, costs: list[Cost], part: str) -> float:
    """Cost ratio per doubling of the size, from the first to the last point."""
    first, last = costs[0], costs[-1]
    doublings = math.log2(getattr(last.size, name) / getattr(first.size, name))
    ratio: float = (getattr(last, part) / max(1e-9, getattr(first, part))) ** (1 / doublings)
    return ratio


def report(name: str, costs: list[Cost]) -> None:
    """Print one series."""
    head = [name, *(f"{p}\nms" for p in PARTS), "draft\nMiB", "buffer\nMiB", "process\nMiB"]
    body = []
    for c in costs:
        numbers = [f"{getattr(c, p):.2f}" for p in PARTS]
        body.append(
            [str(getattr(c.size, name)), *numbers, f"{c.draft_mb:.1f}", f"{c.buffer_mb:.1f}", f"{c.peak_mb:.0f}"]
        )
    body.append(["per doubling", *(f"{growth(name, costs, p):.2f}x" for p in PARTS), "", "", ""])
    base = costs[0].size
    rest = f"hidden {base.hidden}, vocabulary {base.vocabulary}, {base.documents} x {base.length} tokens"
    show(f"Growing {name}; else {rest}", head, body)


def write_picture(results: dict[str, list[Cost]], file: Path) -> None:
    """One panel for each size that grew, both axes logarithmic; dotted lines are linear growth."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(4 * len(results), 3.8), constrained_layout=True, sharey=True)
    for axis, (name, costs) in zip(axes, results.items(), strict=True):
        sizes = [getattr(c.size, name) for c in costs]
        for part in PARTS:
            times = [getattr(c, part) for c in costs]
            (line,) = axis.plot(sizes, times, marker="o", ms=4, label=part)
            axis.plot(sizes, [times[0] * s / sizes[0] for s in sizes], ":", color=line.get_color(), lw=0.9, alpha=0.7)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sizes, [str(s) for s in sizes])
        axis.set_xlabel({"hidden": "hidden size", "length": "tokens of a document"}.get(name, name))
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("milliseconds")
    axes[0].legend(fontsize=8)
    figure.suptitle("What a step costs besides drafting, against the size (dotted: linear growth)")
    figure.savefig(file, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
