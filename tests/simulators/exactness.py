"""Runs at scale under the evidence of exact sampling: engines that sample from the policy, and engines that do not.

*Places* of texts have distributions whose logits fall with the logarithm of the rank, some sharp and some flat, at a mean
entropy of 0.5 nats (a policy that RL has sharpened) or 2.9 (one at temperature 1). Actor and engine differ by rounding, 0.03
nats a token, as a real engine in bfloat16 does. A phase has the chosen tokens of all ranks, anywhere in responses of up to 16k.

``select`` is a toy of *which* tokens count, with exact sampling: sentences that go on, end, or end the text, so that a text's
end, its length and its reward hang on what was sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spec_plugin.policy.exactness.capital import PLAIN, SHAPE, WEIGHED, Capital, Floats, bets, growth
from spec_plugin.policy.exactness.plugin import ALLOWED, REFUSED
from spec_plugin.policy.exactness.statistics import statistics_of

#: nats, in the mean of a policy's places
ENTROPIES = (0.5, 2.9)
#: places, and tokens of each: what lies behind them has no probability
PLACES, V = 64, 512
#: nats by which engine and actor differ
ROUNDING = 0.03
#: of the chosen tokens, in each band: those of responses of up to 16k, log-normal with a median of 4k
SHARES = (0.055, 0.15, 0.42, 0.375)
#: the first band that is wrong of a late fault: 37 % of the tokens, where a text has so many
LATE = 3


@dataclass(frozen=True)
class Laws:
    """Distributions of the places, [PLACES, V] float64 each."""

    actor: Floats
    engine: Floats  # that it has, and states
    draft: Floats  # of the draft, 0.3 nats (or as many as the entropy) away
    older: Floats  # of a policy 0.05 nats away

    @property
    def hot(self) -> Floats:
        """The draft's likeliest token."""
        return np.eye(V)[self.draft.argmax(-1)]


Engine = Callable[[Laws], Floats]
#: what is wrong of an engine that is, see ``run``
FAULTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("", {}),
    (", from token 4096 on alone", {"late": True}),
    (", from phase 100 on", {"begins": 100}),
    (", stated alike", {"stated": True}),
)


def tempered(law: Floats, temperature: float) -> Floats:
    """At another temperature."""
    powers = law ** (1.0 / temperature)
    return powers / powers.sum(-1, keepdims=True)


def mixed(share: float, other: Callable[[Laws], Floats]) -> Engine:
    """An engine that samples this share of the tokens from something else."""
    return lambda laws: (1.0 - share) * laws.engine + share * other(laws)


def _first(share: float) -> Engine:
    return mixed(share, lambda _: np.tile(np.eye(V)[V // 2], (PLACES, 1)))


def _bonus(laws: Laws) -> Floats:
    """Every bonus token (k = 3) comes from the draft."""
    accepted = np.minimum(laws.engine, laws.draft).sum(-1).mean()
    return mixed(accepted**3 * (1 - accepted) / (1 - accepted**4), lambda of: of.draft)(laws)


def _cut(laws: Laws) -> Floats:
    kept = np.where(laws.engine >= np.sort(laws.engine, -1)[:, -20:-19], laws.engine, 0.0)
    return kept / kept.sum(-1, keepdims=True)


ENGINES: dict[str, Engine] = {
    "temperature 0.9": lambda laws: tempered(laws.engine, 0.9),
    "temperature 1.1": lambda laws: tempered(laws.engine, 1.1),
    "temperature 0.99": lambda laws: tempered(laws.engine, 0.99),
    "greedy draft taken unasked in 2 % of tokens": mixed(0.02, lambda laws: laws.hot),
    "the same in 10 %": mixed(0.1, lambda laws: laws.hot),
    "bonus token from the draft": _bonus,
    "an older policy, 0.05 nats": lambda laws: laws.older,
    "one token for 1 % of all (NaN)": _first(0.01),
    "the same for 0.1 %": _first(0.001),
    "top-k 20 that nobody asked for": _cut,
}


def _softmax(logits: Floats) -> Floats:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    found: Floats = powers / powers.sum(-1, keepdims=True)
    return found


def _entropy(law: Floats) -> float:
    return float(-(law * np.log(law + 1e-300)).sum(-1).mean())


def _solve(rising: Callable[[float], float], wanted: float, high: float) -> float:
    low = 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return (low + high) / 2


def _apart(law: Floats, other: Floats) -> float:
    return float((law * (np.log(law + 1e-300) - np.log(other + 1e-300))).sum(-1).mean())


def _off(law: Floats, other: Floats) -> float:
    return float((law * np.abs(np.log(law + 1e-300) - np.log(other + 1e-300))).sum(-1).mean())


@lru_cache(maxsize=2)
def laws_of(entropy: float) -> Laws:
    """Those of a policy with this mean entropy in nats."""
    stream = np.random.default_rng(0)
    ranks = np.log1p(np.arange(V)) * stream.lognormal(0.0, 0.4, (PLACES, 1))
    shape = -2.0 * ranks + 0.4 * stream.normal(size=(PLACES, V))
    logits = shape * _solve(lambda sharp: -_entropy(_softmax(sharp * shape)), -entropy, 12.0)
    engine = _softmax(logits)
    noises = stream.normal(size=(3, PLACES, V))
    steps = [
        _solve(lambda s, noise=noise: _apart(engine, _softmax(logits + s * noise)), apart, 20.0)
        for noise, apart in zip(noises, (0.3 * min(1.0, entropy), 0.05), strict=False)
    ]
    draft, older = (_softmax(logits + step * noise) for step, noise in zip(steps, noises, strict=False))
    rounded = _solve(lambda s: _off(engine, _softmax(logits + s * noises[2])), ROUNDING, 20.0)
    return Laws(_softmax(logits + rounded * noises[2]), engine, draft, older)


@dataclass(frozen=True)
class _Table:
    """Every token at every place: the chance that an engine samples it, and what bets make of it."""

    chances: Floats  # [PLACES * V], cumulated
    bets: NDArray[np.float32]  # [PLACES * V, cells of one place]


@lru_cache(maxsize=4)
def _table(entropy: float, name: str, stated: bool) -> _Table:
    laws = laws_of(entropy)
    sampled = laws.engine if name == "" else ENGINES[name](laws)
    says = sampled if stated else laws.engine
    tokens, found = torch.arange(V), []
    for actor, engine in zip(laws.actor, says, strict=True):
        values = statistics_of(torch.from_numpy(np.log(actor)).expand(V, V), tokens).numpy()
        weights = actor / np.maximum(engine, 1e-300)
        found.append(bets(values, weights, ALLOWED["bfloat16"]).reshape(V, -1).astype(np.float32))
    return _Table((sampled / PLACES).ravel().cumsum(), np.concatenate(found))


@dataclass(frozen=True)
class Outcome:
    """What became of one run."""

    highest: float  # level, log10
    stopped_after: int | None  # tokens
    warned_after: int | None  # of what is stated as it is sampled

    @property
    def noticed_after(self) -> float:
        """Tokens until it was stopped, or warned of; infinite: neither."""
        return min((n for n in (self.stopped_after, self.warned_after) if n is not None), default=float("inf"))


def run(
    entropy: float,
    name: str,
    phases: int,
    tokens: int,
    seed: int,
    *,
    stated: bool = False,
    late: bool = False,
    begins: int = 0,
) -> Outcome:
    """One run.

    Args:
        entropy: of the policy, nats.
        name: of ``ENGINES``; "": a right one.
        phases: of it, at most: a stopped one ends.
        tokens: chosen in each, on all ranks together.
        seed: of it.
        stated: does the engine state the distribution that it samples from, and not the policy's.
        late: is it wrong only in the last band of positions.
        begins: phase from which on it is wrong; tokens are counted from there.
    """
    stream, capital = np.random.default_rng((seed, phases)), Capital.new()
    right, wrong = _table(entropy, "", False), _table(entropy, name, stated)
    highest, stopped, warned = 0.0, None, None
    for phase in range(begins + phases):
        parts, after = [], (phase + 1 - begins) * tokens
        for band, count in enumerate(stream.multinomial(tokens, SHARES)):
            table = right if phase < begins or (late and band < LATE) else wrong
            drawn = np.searchsorted(table.chances, stream.random(count) * table.chances[-1])
            parts.append(table.bets[drawn].sum(0, dtype=np.float64).reshape(SHAPE[0], *SHAPE[2:]))
        each = np.stack(parts, 1)
        capital = capital.after(np.concatenate([each.sum(1, keepdims=True), each], 1), tokens)
        highest = max(highest, capital.log10(WEIGHED))
        if (stated or not name) and warned is None and capital.log10(PLAIN) >= -np.log10(REFUSED):
            warned = after
        if highest >= -np.log10(REFUSED):
            stopped = after
            break
        if stated and warned is not None:
            break
    return Outcome(highest, stopped, warned)


# ---- which tokens count

#: places of a text: inside a sentence, at its end, at the text's; the chance to end the text there, and of the likeliest token
_KINDS, _ENDS, _TOPS = (0.9, 0.07, 0.03), (0.0005, 0.03, 0.5), (0.85, 0.5, 0.4)
#: other tokens, and most of a text
_OTHERS, _LONGEST = 20, 400


@dataclass(frozen=True)
class Texts:
    """Responses, [n, _LONGEST] each."""

    tokens: NDArray[np.int64]  # 0 ends the text, 1 is the likeliest other one
    kinds: NDArray[np.int64]
    lengths: NDArray[np.int64]  # [n], the end included

    @property
    def inside(self) -> NDArray[np.bool_]:
        """Is there a token."""
        return np.arange(_LONGEST) < self.lengths[:, None]

    @property
    def rewarded(self) -> NDArray[np.bool_]:
        """[n]: a reward that looks at the text."""
        share: Floats = ((self.tokens == 1) & self.inside).sum(1) / self.lengths
        return share > 0.83


def _toy_laws() -> Floats:
    rest = [(1.0 - end - top) / _OTHERS for end, top in zip(_ENDS, _TOPS, strict=True)]
    return np.array([[e, t, *[r] * _OTHERS] for e, t, r in zip(_ENDS, _TOPS, rest, strict=True)])


def texts(n: int, stream: np.random.Generator) -> Texts:
    """So many, sampled exactly."""
    kinds = stream.choice(3, (n, _LONGEST), p=_KINDS)
    cumulated = _toy_laws().cumsum(-1)
    tokens = (stream.random((n, _LONGEST, 1)) > cumulated[kinds]).sum(-1).clip(max=_OTHERS + 1)
    ended = tokens == 0
    return Texts(tokens, kinds, np.where(ended.any(1), ended.argmax(1) + 1, _LONGEST))


def _in_order(found: Texts, order: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """Whole texts in this order, until a share of all tokens is spent: the first that does not fit is left out with the rest."""
    fits = found.lengths[order].cumsum() <= share * found.lengths.sum()
    kept = np.zeros(len(order), bool)
    kept[order[fits]] = True
    return found.inside & kept[:, None]


def _mixed_groups(found: Texts, of: int = 4) -> NDArray[np.bool_]:
    groups = found.rewarded.reshape(-1, of)
    return found.inside & np.repeat(groups.any(1) & ~groups.all(1), of)[:, None]


Select = Callable[[Texts, np.random.Generator], NDArray[np.bool_]]
#: how tokens may be chosen, and whether whether a token counts hangs on it or on what follows it
SELECTIONS: dict[str, tuple[bool, Select]] = {
    "all": (True, lambda t, _: t.inside),
    "a coin for each token (the rule)": (True, lambda t, s: t.inside & (s.random(t.inside.shape) < 0.5)),
    "a coin for each prompt": (True, lambda t, s: t.inside & (s.random((len(t.lengths), 1)) < 0.5)),
    "the first 60 tokens of each": (True, lambda t, _: t.inside & (np.arange(_LONGEST) < 60)),
    "what comes behind token 60": (True, lambda t, _: t.inside & (np.arange(_LONGEST) >= 60)),
    "the shorter half": (False, lambda t, _: t.inside & (t.lengths <= np.median(t.lengths))[:, None]),
    "the longest quarter": (False, lambda t, _: t.inside & (t.lengths >= np.quantile(t.lengths, 0.75))[:, None]),
    "shortest first, as many as a budget holds": (False, lambda t, _: _in_order(t, t.lengths.argsort(), 0.5)),
    "only those that are rewarded": (False, lambda t, _: t.inside & t.rewarded[:, None]),
    "only groups of mixed rewards": (False, lambda t, _: _mixed_groups(t)),
    "without the token that ends the text": (False, lambda t, _: t.inside & (t.tokens != 0)),
}


@lru_cache(maxsize=1)
def _toy_bets() -> Floats:
    """[kinds, tokens, designs, S, bets], of an engine that rounds nothing."""
    laws = _toy_laws()
    each = [
        statistics_of(torch.from_numpy(np.log(law)).expand(len(law), len(law)), torch.arange(len(law))) for law in laws
    ]
    return np.stack([bets(values.numpy(), np.ones(len(values)), None) for values in each])


def select(name: str, phases: int, responses: int, seed: int) -> Outcome:
    """One run whose engine is right, and whose tokens count by this rule.

    Args:
        name: of ``SELECTIONS``.
        phases: of it, at most.
        responses: of a phase, in groups of four.
        seed: of it.
    """
    stream, capital, table = np.random.default_rng((seed, 7)), Capital.new(), _toy_bets()
    highest, tokens = 0.0, 0
    for _ in range(phases):
        found = texts(responses, stream)
        rows, places = SELECTIONS[name][1](found, stream).nonzero()
        if not len(rows):
            continue
        kinds, sampled = found.kinds[rows, places], found.tokens[rows, places]
        capital = capital.after(growth(table[kinds, sampled], places), len(rows))
        tokens += len(rows)
        highest = max(highest, capital.log10(WEIGHED))
        if highest >= -np.log10(REFUSED):
            return Outcome(highest, tokens, None)
    return Outcome(highest, None, None)
