"""What statistics of the draft's distribution q would add to the evidence of exact sampling; the product has none.

Two, each with mean zero under the policy's p: was the draft's likeliest token sampled, less p of that; and log q / p of the
token, clipped to 4 nats either way, less its mean under p, over 4. Cells for them stand beside those of the product.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from simulators.exactness import ENGINES, PLACES, SHARES, Floats, V, laws_of
from spec_plugin.policy.exactness.capital import WEIGHED, Capital, bets
from spec_plugin.policy.exactness.plugin import REFUSED
from spec_plugin.policy.exactness.statistics import statistics_of

#: the mistakes that have to do with a draft, and one that has not; "": a right engine
KINDS = ("", *(name for name in ENGINES if "draft" in name or name in ("the same in 10 %", "temperature 0.9")))


def of_draft(p: Floats, q: Floats) -> Floats:
    """Both statistics of all tokens, [V, 2].

    Args:
        p: [V] of the policy.
        q: [V] of the draft.
    """
    likeliest = (np.arange(len(p)) == q.argmax()) - p[q.argmax()]
    ratio = np.clip(np.log(q / p), -4.0, 4.0)
    return np.stack([likeliest, (ratio - p @ ratio) / 4.0], 1)


@lru_cache(maxsize=4)
def _table(entropy: float, name: str, drafts: bool) -> tuple[Floats, NDArray[np.float32]]:
    laws, found = laws_of(entropy), []
    sampled = ENGINES[name](laws) if name else laws.engine
    for p, q, engine in zip(laws.actor, laws.draft, laws.engine, strict=True):
        weights = p / np.maximum(engine, 1e-300)
        values = statistics_of(torch.from_numpy(np.log(p)).expand(V, V), torch.arange(V)).numpy()
        each = bets(values, weights, None)[:, WEIGHED]
        if drafts:
            own = of_draft(p, q)
            # as the product's first two: both ways
            more = bets(np.concatenate([own, own], 1), weights, None)[:, WEIGHED, : own.shape[1]]
            each = np.concatenate([each, more], 1)
        found.append(each.astype(np.float32))
    return (sampled / PLACES).ravel().cumsum(), np.concatenate(found)


def tokens_until_refused(entropy: float, name: str, drafts: bool, phases: int, tokens: int, seed: int) -> float:
    """Of one run, the chosen tokens until it stops; infinite: it does not.

    Args:
        entropy: of the policy, nats.
        name: of ``KINDS``.
        drafts: are the draft's statistics bet on, too.
        phases: of it, at most.
        tokens: chosen in each.
        seed: of it.
    """
    chances, table = _table(entropy, name, drafts)
    stream, capital = np.random.default_rng((seed, phases)), Capital(np.zeros((1, 1 + len(SHARES), *table.shape[1:])))
    for phase in range(phases):
        drawn = [stream.random(count) * chances[-1] for count in stream.multinomial(tokens, SHARES)]
        each = np.stack([table[np.searchsorted(chances, at)].sum(0, dtype=np.float64) for at in drawn])
        capital = capital.after(np.concatenate([each.sum(0, keepdims=True), each])[None], tokens)
        if capital.log10(WEIGHED) >= -np.log10(REFUSED):
            return float((phase + 1) * tokens)
    return float("inf")
