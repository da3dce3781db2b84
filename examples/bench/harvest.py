"""Cost of harvest: what copying hidden states out of a log-prob pass adds to its time and to its memory."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from draft_training import HiddenBuffer  # noqa: E402
from draft_training.config import default_aux_layers  # noqa: E402
from examples.bench import common, workload  # noqa: E402
from examples.bench.common import Seconds, Spread, interleave, paired, say, show, spread, timed, verdict  # noqa: E402
from spec_plugin.api.events import HiddenStates  # noqa: E402
from spec_plugin.policy.online_training import documents_of  # noqa: E402
from spec_plugin.trainer.decoder import find_decoder  # noqa: E402
from spec_plugin.trainer.harvest import harvested, responses_at_the_end  # noqa: E402
from spec_plugin.trainer.harvest_plan import HarvestPlan  # noqa: E402
from spec_plugin.trainer.taps import Taps  # noqa: E402

HELP = """Measure what harvest adds to the log-prob pass that the trainer runs anyway.

\b
A forward pass without gradients over full documents, logits and the log-prob of each token included, in two arms,
in turn:
  plain     the pass alone
  harvest   the pass inside Taps.attached(), and then harvested(): hidden states packed on the CPU;
            then, timed separately, each document is handed to the training buffer, which checks and copies it
Models: a random Qwen3 of 100M parameters and the quickstart's policy, or yours: --target DIR.
Memory: declared is (auxiliary layers + 1) * hidden size * bytes of the dtype, per token.
"""

GOAL = 1.03
LARGE = Qwen3Config(
    vocab_size=16384,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
)


@dataclass(frozen=True)
class Row:
    """The numbers of one model."""

    name: str
    parameters: int
    plain_ms: Spread
    harvest: Spread  # time with harvest / time without, round by round
    buffer: Spread  # time with harvest and buffer / time without
    harvest_cpu: Spread  # the same by CPU time
    buffer_cpu: Spread
    declared: int  # bytes per token
    held: float  # bytes per token of the hidden states that harvested() returns, token ids and mask left out
    overhead: float  # bytes per token of token ids and mask
    peak: float  # bytes per token that the pass needs more at its peak, on any device
    hooks_inside: int
    hooks_outside: int


@click.command(help=HELP, context_settings={"max_content_width": 120, "show_default": True})
@click.option("--target", type=click.Path(path_type=Path, exists=True), help="Measure this model only.")
@click.option("--documents", default=8, help="Documents of the batch.")
@click.option("--length", default=256, help="Tokens of a document.")
@click.option("--rounds", default=15, help="Rounds that count; two more warm up.")
@click.option("--dtype", default="float32")
@click.option("--device", default="auto")
@click.option("--threads", type=int, help="Compute threads; default: all cores.")
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of the JSON file.")
def main(**options: Any) -> None:
    """Measure, report."""
    out: Path = options.pop("out")
    common.prepare_process(options["threads"])
    device = common.pick_device(options["device"])
    where = common.environment(device)
    rows = [measure(name, build(), device, options) for name, build in models(options["target"], options["dtype"])]
    report(rows, options)
    common.write_results("harvest", options, [asdict(r) for r in rows], where, out)


def models(target: Path | None, dtype: str) -> list[tuple[str, Callable[[], Any]]]:
    """Names and builders of the models to measure."""
    kind = getattr(torch, dtype)
    if target is not None:
        return [(target.name, lambda: AutoModelForCausalLM.from_pretrained(target, dtype=kind))]
    policy = workload.default_target()  # before the random model: it may have to be taught
    return [
        ("random Qwen3", lambda: Qwen3ForCausalLM(LARGE).to(kind)),
        ("quickstart policy", lambda: AutoModelForCausalLM.from_pretrained(policy, dtype=kind)),
    ]


def measure(name: str, model: Any, device: str, options: dict[str, Any]) -> Row:
    """All arms on one model, in turn."""
    model = model.to(device).eval()
    aux = default_aux_layers(model.config.num_hidden_layers)
    taps = Taps.of(find_decoder(model), aux)
    generator = torch.Generator().manual_seed(0)
    shape = (options["documents"], options["length"])
    ids = torch.randint(2, model.config.vocab_size, shape, generator=generator).to(device)
    buffer = HiddenBuffer(4 * ids.numel(), 1 << 40, seed=0)

    def once(capture: bool) -> HiddenStates | None:
        with taps.attached() if capture else nullcontext():
            log_probs(model, ids)
        return take(taps, ids) if capture else None

    def with_harvest(_: int) -> tuple[Seconds, Seconds]:
        kept: list[HiddenStates] = []
        harvested = timed(lambda: kept.append(once(True)), device)
        filled = timed(lambda: [buffer.add(d) for d in documents_of(kept[0])], device)
        return harvested, harvested + filled

    arms = {"plain": lambda _: timed(lambda: once(False), device), "harvest": with_harvest}
    runs = interleave(arms, options["rounds"], warmup=2, label=f"{name}: plain and harvest in turn")
    say(f"{name}: memory")
    inside, outside = hooks(model, taps)
    with taps.attached():
        log_probs(model, ids)
    hidden = take(taps, ids)
    extra = peak_bytes(lambda: once(True)) - peak_bytes(lambda: once(False))
    n, itemsize = ids.numel(), hidden.aux.element_size()
    return Row(
        name=name,
        parameters=sum(p.numel() for p in model.parameters()),
        plain_ms=spread([1e3 * s.wall for s in runs["plain"]]),
        **ratios(runs["plain"], runs["harvest"]),
        declared=(len(aux) + 1) * model.config.hidden_size * itemsize,
        held=(hidden.aux.nbytes + hidden.last.nbytes) / n,
        overhead=(hidden.input_ids.nbytes + hidden.loss_mask.nbytes) / n,
        peak=extra / n,
        hooks_inside=inside,
        hooks_outside=outside,
    )


def ratios(plain: list[Seconds], harvested: list[tuple[Seconds, Seconds]]) -> dict[str, Spread]:
    """The four ratios of a row, each round by round."""
    found = {}
    for index, name in enumerate(("harvest", "buffer")):
        found[name] = paired([h[index].wall for h in harvested], [p.wall for p in plain])
        found[f"{name}_cpu"] = paired([h[index].cpu for h in harvested], [p.cpu for p in plain])
    return found


@torch.no_grad()
def log_probs(model: Any, ids: Tensor) -> Tensor:
    """[B, T - 1]: what a trainer's log-prob pass computes."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    chosen = logits.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return chosen - logits.logsumexp(-1)


def take(taps: Taps, ids: Tensor) -> HiddenStates:
    """The whole batch; the second half of each document counts as its response."""
    masks = responses_at_the_end(list(ids), [ids.shape[1] // 2] * ids.shape[0])
    hidden = harvested(taps, (list(ids), masks), HarvestPlan(1 << 30))
    assert hidden is not None
    return hidden


def hooks(model: torch.nn.Module, taps: Taps) -> tuple[int, int]:
    """Hooks on all modules inside a capture, and after it."""

    def count() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    before = count()
    with taps.attached():
        inside = count()
    return inside - before, count() - before


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations made and that are still alive, on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._owners: dict[int, int] = {}  # address of a storage -> tensors on it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
            if address in self._owners or not _is_input(address, args):
                self._hold(tensor, address, size)
        return out

    def _hold(self, tensor: Tensor, address: int, size: int) -> None:
        if address not in self._owners:
            self._owners[address] = 0
            self.live += size
            self.peak = max(self.peak, self.live)
        self._owners[address] += 1
        weakref.finalize(tensor, self._release, address, size)

    def _release(self, address: int, size: int) -> None:
        self._owners[address] -= 1
        if not self._owners[address]:
            del self._owners[address]
            self.live -= size


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _is_input(address: int, args: Any) -> bool:
    """Is this the storage of an argument, e.g. of a parameter that is viewed?"""
    return any(t.untyped_storage().data_ptr() == address for t in _tensors(args))


def peak_bytes(call: Callable[[], Any]) -> int:
    """Most bytes alive at once that were made by operations inside the call."""
    with _LiveBytes() as counter:
        call()
    return counter.peak


def report(rows: list[Row], options: dict[str, Any]) -> None:
    """Print both tables."""
    batch = f"{options['documents']} x {options['length']} tokens, {options['dtype']}"
    head = ["model", "parameters", "pass ms", "with harvest", "with harvest\nand buffer"]
    head += ["with harvest\nCPU time", "and buffer\nCPU time", "goal"]
    body = [
        [
            r.name,
            f"{r.parameters / 1e6:.1f}M",
            r.plain_ms.text(),
            r.harvest.text(".3f") + " x",
            r.buffer.text(".3f") + " x",
            r.harvest_cpu.text(".3f") + " x",
            r.buffer_cpu.text(".3f") + " x",
            verdict(r.harvest.median <= GOAL, f"≤ {GOAL} x"),
        ]
        for r in rows
    ]
    show(f"Cost of harvest in the log-prob pass: {batch}. Medians (quartiles)", head, body)
    head = ["model", "declared", "held", "ids and mask", "peak", "hooks inside\ncapture", "hooks outside"]
    body = []
    for r in rows:
        sizes = [f"{r.held:.0f}", f"{r.overhead:.0f}", f"{r.peak:.0f} ({r.peak / r.declared:.2f} x)"]
        body.append([r.name, str(r.declared), *sizes, str(r.hooks_inside), str(r.hooks_outside)])
    show("Memory of harvest, bytes per token", head, body)


if __name__ == "__main__":
    main()
