"""What the guard's bookkeeping adds to a step as its tokens grow: spans, witnesses, lags, and the check itself."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from examples.bench import common  # noqa: E402
from examples.bench.common import show, track  # noqa: E402
from spec_plugin.api.config import SpecConfig  # noqa: E402
from spec_plugin.api.events import Drafts, LogprobBatch, TargetInfo  # noqa: E402
from spec_plugin.api.spans import Span, Spans, fingerprints  # noqa: E402
from spec_plugin.policy.provenance import ProvenanceGuard, by_lag  # noqa: E402
from spec_plugin.trainer.log_probs import Responses, with_kept_log_probs  # noqa: E402

HELP = """Time what judges the log-probs of a step, from ten thousand to a million tokens.

\b
Sequences of --length tokens, each of them cut by a weight sync in the middle. For each number of tokens:
  spans      which policy version sampled which token, found in what the engines said
  witnesses  log-probs that the trainer did not ask for, found for its documents
  lags       the tokens of each lag
  check      the whole provenance check of that batch
The last row says how much more ten times as many tokens cost: 10 is linear.
"""
PARTS = ("spans", "witnesses", "lags", "check")
PROMPT = 64


@dataclass(frozen=True)
class Cost:
    """Milliseconds, medians."""

    tokens: int
    spans: float
    witnesses: float
    lags: float
    check: float


@click.command(help=HELP, context_settings={"max_content_width": 120, "show_default": True})
@click.option("--rounds", default=5, help="Rounds that count; one more warms up.")
@click.option("--length", default=1000, help="Sampled tokens of a sequence.")
@click.option("--most", default=1_000_000, help="Tokens of the largest step.")
@click.option("--threads", type=int, help="Compute threads; default: all cores.")
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of the JSON.")
def main(rounds: int, length: int, most: int, threads: int | None, out: Path) -> None:
    """Measure and report."""
    common.prepare_process(threads)
    sizes = [n for n in (10_000, 30_000, 100_000, 300_000, 1_000_000) if n <= most]
    costs = [measure(max(1, n // length), length, rounds) for n in track(sizes, "tokens")]
    body = [[f"{c.tokens:,}", *(f"{getattr(c, part):.1f}" for part in PARTS)] for c in costs]
    first, last = costs[0], costs[-1]
    tens = torch.tensor(last.tokens / first.tokens).log10().item() or 1.0
    body.append(["ten times", *(f"{(getattr(last, p) / getattr(first, p)) ** (1 / tens):.1f}x" for p in PARTS)])
    show(f"Sequences of {length} tokens", ["tokens", *(f"{part}\nms" for part in PARTS)], body)
    where = common.environment("cpu")
    common.write_results("tokens", {"rounds": rounds, "length": length}, {"costs": costs}, where, out)


def measure(sequences: int, length: int, rounds: int) -> Cost:
    """All parts, of so many sequences."""
    torch.manual_seed(0)
    documents = list(torch.randint(150_000, (sequences, PROMPT + length)))
    starts, half = [PROMPT] * sequences, length // 2
    mask = torch.ones(sequences, length, dtype=torch.bool)
    recomputed = -torch.rand(sequences, length)
    spans = Spans()
    for document in documents:
        tokens = document.tolist()
        cut = PROMPT + half
        marks = fingerprints(tokens)
        stretches = ((PROMPT, cut, 1), (cut, len(tokens), 2))
        spans.add([Span(int(marks[end]), first, end, version, 0, 0) for first, end, version in stretches], 2)
    known = [
        Span(
            int(fingerprints(d.tolist())[-1]),
            PROMPT,
            len(d),
            2,
            0,
            0,
            log_probs=recomputed[i].double().numpy().tobytes(),
        )
        for i, d in enumerate(documents[:64])
    ]
    versions, plain = spans.of(documents, starts, mask)
    batch = LogprobBatch(
        policy_version=2,
        recomputed=recomputed,
        rollout=recomputed + 1e-6 * torch.randn(sequences, length),
        mask=mask,
        versions=versions,
        drafted=torch.where(plain, Drafts.CONTROL, Drafts.ON),
        rollout_in_loss=False,
        lag_allowed=True,
    )
    guard = ProvenanceGuard()
    target = TargetInfo("/model", {"vocab_size": 150_000, "hidden_size": 8, "num_hidden_layers": 1}, "float32")
    guard.spec_configure(config=SpecConfig(), target=target)
    return Cost(
        sequences * length,
        spans=_ms(lambda: spans.of(documents, starts, mask), rounds),
        witnesses=_ms(lambda: with_kept_log_probs(batch, Responses(documents, starts, mask, None), known), rounds),
        lags=_ms(lambda: list(by_lag(batch)), rounds),
        check=_ms(lambda: guard.spec_check_logprobs(batch=batch), rounds),
    )


def _ms(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times[1:])


if __name__ == "__main__":
    main()
