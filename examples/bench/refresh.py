"""Refresh in a running engine: milliseconds to replace the draft with requests in flight, none of which may notice."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from draft_training import fingerprint, load_draft  # noqa: E402
from examples.bench import common, workload  # noqa: E402
from examples.bench.common import Spread, say, show, spread, verdict  # noqa: E402
from examples.quickstart.policy import made_whole  # noqa: E402

if TYPE_CHECKING:
    from examples.bench.engines import Engine, Timing

HELP = """Measure a refresh of the draft in a running engine.

\b
Requests are decoded greedily with k drafted tokens. Every few steps, with all of them in flight, the draft is replaced from
a file: spec_install_file reads it, checks names, shapes, values and digest, swaps, and reads everything back.
Every other refresh spoils the draft with noise, so acceptance moves, but no request may be aborted and no output may
differ from a run without refreshes.
Two drafts are measured: one of the quickstart's size, trained, and one for a target of hidden size 1024.
What a trainer adds before the file is there is not in here; in verl's runs the metric spec/refresh_ms has it.
"""

GOAL_MS = 50.0
LARGE = Qwen3Config(
    vocab_size=4096,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
    eos_token_id=0,
    pad_token_id=1,
    bos_token_id=None,
)


@dataclass(frozen=True)
class Row:
    """The numbers of one draft."""

    name: str
    parameters: int
    megabytes: float
    refreshes: int
    refused: int
    install_ms: Spread  # as the caller waits
    requests: int
    aborted: int
    identical: int  # requests whose greedy output is that of the run without refreshes
    acceptance_before: float  # acceptance length without and with refreshes
    acceptance_during: float


@click.command(help=HELP, context_settings={"max_content_width": 120, "show_default": True})
@click.option("--target", type=click.Path(path_type=Path, exists=True), help="Measure this target, with --draft, only.")
@click.option("--draft", type=click.Path(path_type=Path, exists=True), help="Folder of its draft.")
@click.option("--prompts", "file", type=click.Path(path_type=Path, exists=True), help="JSON list of texts.")
@click.option("--k", default=3, help="Tokens drafted per step.")
@click.option("--batch", default=16, help="Requests in flight.")
@click.option("--tokens", default=48, help="Tokens per request.")
@click.option("--every", default=2, help="Engine steps between two refreshes.")
@click.option("--refreshes", default=24, help="Refreshes to measure, at least.")
@click.option("--dtype", default="float32", help="Of engine and draft.")
@click.option("--device", default="auto", help="For preparation; engines use what their vLLM was built for.")
@click.option("--threads", type=int, help="Compute threads; default: all cores.")
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of the JSON file.")
def main(**options: Any) -> None:
    """Prepare, measure, report."""
    out: Path = options.pop("out")
    common.prepare_process(options["threads"])
    device = common.pick_device(options["device"])
    chosen = cases(options, device)

    from examples.bench.engines import EngineSettings, build  # slow to import

    settings = EngineSettings(dtype=options["dtype"], memory_share=0.7 / len(chosen))
    rows = []
    for name, target, draft, prompts in chosen:
        say(f"{name}: starting the engine")
        engine = build("flag", target, settings, draft, options["k"])
        rows.append(measure(name, engine, draft, prompts, options))
    where = common.environment(device)
    report(rows)
    common.write_results("refresh", {**options, **asdict(settings)}, [asdict(r) for r in rows], where, out)


def cases(options: dict[str, Any], device: str) -> list[tuple[str, Path, Path, workload.Prompts]]:
    """Name, target, draft and prompts of what is measured."""
    n, dtype = options["batch"], options["dtype"]
    if options["target"] is not None:
        target, draft = options["target"], options["draft"] or workload.newborn_draft(options["target"], dtype)
        return [(target.name, target, draft, workload.prompts_of(target, options["file"], n, seed=3000))]
    small = workload.default_target()
    settings = workload.DraftSettings(k=options["k"], dtype=dtype)
    trained = workload.trained_draft(small, lambda m: workload.addition_prompts(small, m, seed=1), settings, device)
    large = large_target(dtype)
    random_prompts = [[(7 * i + j * j) % 4000 + 2 for j in range(12)] for i in range(n)]
    return [
        (
            "quickstart",
            workload.padded_target(small, 0, dtype),
            trained.path,
            workload.addition_prompts(small, n, 3000),
        ),
        ("hidden size 1024", large, workload.newborn_draft(large, dtype), random_prompts),
    ]


def large_target(dtype: str) -> Path:
    """A random Qwen3 that nearly always says the current token + 37: no ties that rounding could turn."""
    out = workload.CACHE / f"large-{LARGE.hidden_size}-{dtype}"
    if not out.exists():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(LARGE)
        embed = torch.nn.functional.normalize(torch.randn(LARGE.vocab_size, LARGE.hidden_size), dim=-1)
        model.model.embed_tokens.weight.data = 8 * embed
        model.lm_head.weight.data = embed.roll(37, 0).clone()
        with made_whole(out) as partial:
            model.to(getattr(torch, dtype)).save_pretrained(partial)
    return out


def measure(name: str, engine: Engine, draft: Path, prompts: workload.Prompts, options: dict[str, Any]) -> Row:
    """Generate without refreshes, then with them until there were enough."""
    tokens = options["tokens"]
    engine.set_k(options["k"])
    engine.run(prompts, 0.0, tokens)  # warm-up
    reference = engine.run(prompts, 0.0, tokens)
    runs: list[Timing] = []
    say(f"{name}: {options['refreshes']} refreshes with {len(prompts)} requests in flight")
    with tempfile.TemporaryDirectory() as folder:
        refresher = Refresher(engine, drafts(draft, Path(folder)), options["every"])
        while len(refresher.reports) < options["refreshes"]:
            runs.append(engine.run(prompts, 0.0, tokens, between=refresher.tick))
    same = sum(a == b for run in runs for a, b in zip(run.outputs, reference.outputs, strict=True))
    tensors = load_draft(draft)[1]
    installs = [r for r in refresher.reports if r["installed"]]
    if not installs:
        raise RuntimeError(f"no refresh was installed: {refresher.reports[0]['reason']}")
    drafted = sum(r.drafts for r in runs)
    return Row(
        name=name,
        parameters=sum(t.numel() for t in tensors.values()),
        megabytes=sum(t.nbytes for t in tensors.values()) / 1e6,
        refreshes=len(installs),
        refused=len(refresher.reports) - len(installs),
        install_ms=spread([r["install_ms"] for r in installs]),
        requests=sum(len(r.outputs) for r in runs),
        aborted=sum(reason != "length" for r in runs for reason in r.reasons),
        identical=same,
        acceptance_before=reference.acceptance_length,
        acceptance_during=1 + sum(r.accepted for r in runs) / drafted,
    )


def drafts(source: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """What is sent of one refresh after the other, by files in a folder: the draft spoiled by noise, the draft, and so on."""
    tensors = load_draft(source)[1]
    generator = torch.Generator().manual_seed(0)
    spoiled = {
        n: t + 0.1 * torch.randn(t.shape, generator=generator).to(t.dtype) if t.is_floating_point() else t
        for n, t in tensors.items()
    }
    both = []
    for name, sent in (("spoiled", spoiled), ("draft", tensors)):
        file = folder / f"{name}.safetensors"
        save_file({n: t.contiguous() for n, t in sent.items()}, file)
        both.append({"path": str(file), "digest": fingerprint(sent), "names": list(sent)})
    for i in count():
        yield both[i % 2]


class Refresher:
    """Replaces the draft every few engine steps, and keeps what the worker answered."""

    def __init__(self, engine: Engine, drafts: Iterator[dict[str, Any]], every: int) -> None:
        self._engine, self._drafts, self._every = engine, drafts, every
        self._steps = 0
        self.reports: list[dict[str, Any]] = []

    def tick(self) -> None:
        """One engine step is over, and requests are in flight."""
        self._steps += 1
        if self._steps % self._every:
            return
        sent, version = next(self._drafts), len(self.reports) + 1
        began = time.perf_counter()
        answer = self._engine.rpc("spec_install_file", version=version, **sent)
        self.reports.append({**answer, "install_ms": 1e3 * (time.perf_counter() - began)})


def report(rows: list[Row]) -> None:
    """Print the table."""
    head = ["draft", "parameters", "MB", "refreshes\n(refused)", "refresh ms"]
    head += ["requests\naborted", "greedy outputs\nidentical", "acceptance length\nwithout, with", "goal"]
    body = []
    for r in rows:
        size = [f"{r.parameters / 1e6:.2f}M", f"{r.megabytes:.1f}", f"{r.refreshes} ({r.refused})"]
        kept = [f"{r.aborted} of {r.requests}", f"{r.identical} of {r.requests}"]
        acceptance = f"{r.acceptance_before:.2f}, {r.acceptance_during:.2f}"
        body.append([r.name, *size, r.install_ms.text(), *kept, acceptance, verdict(reached(r), f"≤ {GOAL_MS:.0f} ms")])
    show("Refresh in a running engine. Medians (quartiles)", head, body)


def reached(row: Row) -> bool:
    """Fast enough, nothing refused, and no request noticed."""
    undisturbed = row.aborted == 0 and row.identical == row.requests and row.refused == 0
    return row.install_ms.median <= GOAL_MS and undisturbed


if __name__ == "__main__":
    main()
