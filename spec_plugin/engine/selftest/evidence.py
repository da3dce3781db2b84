"""Do sampled tokens follow the log-probs that are stated for them: a likelihood ratio against what a wrong sampler would do.

``evidence`` is the likelihood ratio of a fixed mixture of alternatives to the stated distribution. Its expectation is <= 1
under the null, token by token, given everything before, so P(ratio >= 1 / alpha) <= alpha by Markov's inequality (an e-value;
Grünwald, de Heide, Koolen 2024), for every sample size. It adds up many small deviations that no single context shows.

Half of the mixture are faults that treat tokens by their place: tempered probabilities, mass that leaks into unlikely tokens,
a draft that is accepted unasked in a share of the steps, be it good (the likeliest token) or mediocre (the second, the third).
The other half are faults of one token: its odds are wrong, wherever it may follow; each token of the vocabulary has the same
share of it, so that none has to be guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

TEMPERED = (0.5, 0.8, 0.91, 1.1, 1.25, 2.0)  # probabilities to this power, renormalised
LEAKING = (0.01, 0.1)  # this share of the mass spread evenly over the vocabulary
PLACES = ("likeliest", "second", "third")
BOOSTED = (0.02, 0.05, 0.1, 0.3)  # this share of the mass moved to the token of a place
ODDS = (1 / 3, 2 / 3, 1.5, 3.0)  # of one token, times this
REST_FLOOR = 1e-5  # least mass granted to tokens outside the known top; covers float32 rounding of 1 - sum(top)


@dataclass(frozen=True)
class Evidence:
    """Outcome of ``evidence``."""

    log_ratio: float  # natural log of the likelihood ratio; reject when >= log(1 / alpha)
    tokens: int
    alternative: str  # the alternative that fits best

    @property
    def p_value(self) -> float:
        """An upper bound on the p-value."""
        return min(1.0, math.exp(-self.log_ratio)) if self.log_ratio > 0 else 1.0


@dataclass(frozen=True)
class Stated:
    """What is stated of N sampled tokens."""

    sampled: Floats  # [N] log-prob of the token that was sampled
    top: Floats  # [N, n] log-probs of the n most likely tokens, -inf where a filter (top_k, top_p) removed one
    top_ids: NDArray[np.int64]  # [N, n] these tokens, -1 where there are fewer
    rank: NDArray[np.int64]  # [N] which of them was sampled, -1 when none
    vocab_size: int

    @property
    def rest(self) -> Floats:
        """[N] mass outside the top; never less than its true mass, so that a ratio errs downwards."""
        rest: Floats = np.maximum(1.0 - np.exp(self.top).sum(axis=1), REST_FLOOR)
        return rest


def evidence(stated: Stated) -> Evidence:
    """Likelihood ratio of the mixture to the stated distribution; under the null, P(ratio >= 1/alpha) <= alpha."""
    found = [*_by_place(stated)]
    names, logs = [name for name, _ in found], np.array([log for _, log in found])
    tokens = _by_token(stated)  # [ODDS, V]
    peak = float(max(logs.max(), tokens.max()))
    places = np.exp(logs - peak).mean()
    mixed = peak + math.log(0.5 * places + 0.5 * np.exp(tokens - peak).mean())
    best = names[int(logs.argmax())]
    if tokens.max() > logs.max():
        i, token = np.unravel_index(int(tokens.argmax()), tokens.shape)
        best = f"odds of one token (number {token}) times {ODDS[int(i)]:.2g}"
    return Evidence(mixed, len(stated.sampled), best)


def _by_place(stated: Stated) -> Iterator[tuple[str, float]]:
    top, rank, rest = stated.top, stated.rank, stated.rest
    p, in_top = np.exp(top), rank >= 0
    own = np.where(in_top, stated.sampled, np.log(rest))
    for power in TEMPERED:
        scale = np.log(np.power(p, power).sum(axis=1) + np.power(rest, power))
        yield f"temperature x{1 / power:.2g}", float(((power - 1.0) * own - scale).sum())
    for leak in LEAKING:
        alive = np.isfinite(top).sum(axis=1)
        share = np.where(in_top, 1.0, stated.vocab_size - alive) / stated.vocab_size
        yield f"{leak:.0%} of the mass elsewhere", float(np.log(1.0 - leak + leak * share / np.exp(own)).sum())
    for place, name in enumerate(PLACES[: top.shape[1]]):
        there = np.isfinite(top[:, place])
        chance = np.exp(np.where(there, top[:, place], 0.0))
        for boost in BOOSTED:
            ratio = np.where(there, 1.0 - boost + boost * (rank == place) / chance, 1.0)
            yield f"{boost:.0%} of the mass moved to the {name} token", float(np.log(ratio).sum())


def _by_token(stated: Stated) -> Floats:
    """[ODDS, V] log-ratios; 0 for a token that is in no top."""
    known = (stated.top_ids >= 0) & np.isfinite(stated.top)
    ids, chance = stated.top_ids[known], np.exp(stated.top[known])
    hit = np.flatnonzero(stated.rank >= 0)
    drawn = np.bincount(stated.top_ids[hit, stated.rank[hit]], minlength=stated.vocab_size)
    rows = [
        drawn * math.log(o) - np.bincount(ids, weights=np.log1p((o - 1.0) * chance), minlength=stated.vocab_size)
        for o in ODDS
    ]
    return np.stack(rows)
