"""From samples to the rows of part 3: pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import LogprobProvenanceError
from spec_plugin.api.events import Drafts, LogprobBatch, TargetInfo
from spec_plugin.engine.selftest.self_test_plan import Sampled
from spec_plugin.engine.selftest.verdicts import greedy_check, greedy_limit, greedy_noise, tolerance
from spec_plugin.policy.provenance import ProvenanceGuard

QUANTILES = (0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)
#: sequences of a batch that a guard is shown
BATCH = 64

Pair = tuple[list[list[float]], list[list[float]]]  # log-probs of each sequence: stated by the engine, recomputed


def compare_greedy(arms: Mapping[str, Sequence[Sampled]], dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """A row for each two arms: how many texts are the same, and how large the gap was where they parted.

    Args:
        arms: label, which begins with "plain" or "drafted" -> the same prompts, in order.
        dtype: of the engine.
    """
    plain = [label for label in arms if label.startswith("plain")]
    noise = [v for a, b in itertools.combinations(plain, 2) for v in greedy_noise(arms[a], arms[b])]
    limit = greedy_limit(noise, tolerance(dtype))
    for a, b in itertools.combinations(arms, 2):
        base, other = (a, b) if a in plain else (b, a)
        if base not in plain:
            continue
        gaps = gaps_at_parting(arms[other], arms[base])
        yield {
            "of": other,
            "against": base,
            "prompts": len(arms[base]),
            "identical": len(arms[base]) - len(gaps),
            "gaps": [float(f"{gap:.4g}") for gap in sorted(gaps, reverse=True)],
            "fixed_tolerance": tolerance(dtype),
            "beyond_fixed": sum(gap > tolerance(dtype) for gap in gaps),
            "limit_of_this_noise": limit,
            "self_test_would_pass": greedy_check(arms[other], arms[base], limit).passed,
        }


def gaps_at_parting(one: Sequence[Sampled], base: Sequence[Sampled]) -> list[float]:
    """For each text that differs: how much likelier, in nats, ``base`` says its own token is than the other's."""
    gaps = []
    for a, b in zip(one, base, strict=True):
        t = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y), None)
        if t is not None:
            found = np.flatnonzero(b.top_ids[t] == a.tokens[t])
            # a token that is not among the most likely ones is further away than the last of them
            gaps.append(float(b.logprobs[t] - b.top[t, found[0] if found.size else -1]))
    return gaps


def logprob_row(stated: Sequence[Sequence[float]], recomputed: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Differences of log-probs: of all tokens, and the means of sequences by their length.

    Args:
        stated: of each sequence, by the engine.
        recomputed: of each sequence, by another implementation.
    """
    each = [np.abs(np.array(a) - np.array(b)) for a, b in zip(stated, recomputed, strict=True)]
    signed = np.concatenate([np.array(a) - np.array(b) for a, b in zip(stated, recomputed, strict=True)])
    flat = np.abs(signed)
    known = [q for q in QUANTILES if round(len(flat) * (1 - q), 6) >= 1]  # of fewer tokens it would be their largest
    by_length: dict[int, list[float]] = {}
    for values in each:
        by_length.setdefault(len(values), []).append(float(values.mean()))
    return {
        "tokens": len(flat),
        "mean": float(flat.mean()),
        "signed_mean": float(signed.mean()),
        "quantiles": {f"{q:g}": float(np.quantile(flat, q)) for q in known},
        "max": float(flat.max()),
        "not_finite": int((~np.isfinite(flat)).sum()),
        "beyond_1_nat": int((flat > 1).sum()),
        "beyond_3_nats": int((flat > 3).sum()),
        "sequence_means": {
            str(length): {"sequences": len(means), "median": float(np.median(means)), "max": max(means)}
            for length, means in sorted(by_length.items())
        },
    }


def judge(target: TargetInfo, plain: Pair, drafted: Pair) -> Iterator[dict[str, Any]]:
    """What the provenance guard says: in a run that begins plain, and in one whose first text is drafted.

    Args:
        target: with dtypes and temperature.
        plain: text without drafts.
        drafted: text with drafts.
    """
    for name, phases in (
        ("plain first", [(plain, False), (drafted, True)]),
        ("drafted only", [(drafted, True)]),
        ("plain only", [(plain, False)]),
    ):
        guard, refused, batches = ProvenanceGuard(), [], 0
        guard.spec_configure(SpecConfig(), target)
        for version, (pair, speculating) in enumerate(phases):
            for batch in _batches(pair, version, speculating):
                batches += 1
                try:
                    guard.spec_check_logprobs(batch)
                except LogprobProvenanceError as error:
                    refused.append(str(error))
        metrics = guard.spec_metrics()
        yield {"run": name, "batches": batches, "refused": len(refused), "first": refused[:1], "metrics": metrics}


def _batches(pair: Pair, version: int, speculating: bool) -> Iterator[LogprobBatch]:
    for begin in range(0, len(pair[0]), BATCH):
        stated, recomputed = (
            [torch.tensor(row, dtype=torch.float64) for row in rows[begin : begin + BATCH]] for rows in pair
        )
        mask = _padded([torch.ones(len(row), dtype=torch.bool) for row in stated])
        yield LogprobBatch(
            policy_version=version,
            recomputed=_padded(recomputed),
            rollout=_padded(stated),
            mask=mask,
            versions=torch.full(mask.shape, version),
            drafted=torch.full(mask.shape, Drafts.ON if speculating else Drafts.OFF),
            rollout_in_loss=False,
        )


def _padded(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
