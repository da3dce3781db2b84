"""Engines under the start-up self-test.

Truth. A language model of first order (the next token depends on the last one), random and as sharp or as flat as real ones are;
an engine samples from it, plain requests rightly, and requests with drafts rightly or by one of the mistakes that engines have
had. It states the log-probs of the model. Both arms have the default number of samples, at k = 3. ``WIDE`` is a model with the
vocabulary of a real one: what follows a token depends on its class, and is Zipf's law over tokens in an order of the class's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spec_plugin.engine.selftest.self_test_plan import Sampled
from spec_plugin.engine.selftest.verdicts import counts_check, evidence_check

Model = NDArray[np.float64]
Ints = NDArray[np.int64]
#: vocabulary, tokens of a sequence, prompts, sequences of each, and tokens whose log-probs are stated
V, M, PROMPTS, N, TOP = 50, 9, 4, 256, 20
#: chance that the self-test of a right engine fails, over its two statistics of samples
ALPHA = 1e-6
SHARPNESS = (1.0, 2.5, 5.0)
#: of a wide model: vocabulary, classes of tokens, powers of Zipf's law (entropies of 3 to 0.5 nats), and the log-scale by which
#: the order of a class differs from that of all text
WIDE, CLASSES, POWERS, _ORDERS = 151_936, 16, (1.5, 3.2), 2.0


def model(rng: np.random.Generator, sharpness: float = 2.5) -> Model:
    """[V + 1, V]: distributions of the next token after each token, and of the first one."""
    logits = rng.normal(size=(V + 1, V)) * sharpness
    p = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(p / p.sum(1, keepdims=True))


def wide_model(rng: np.random.Generator) -> Model:
    """[CLASSES + 1, WIDE]: distributions of the next token after each class of tokens, and of the first one."""
    commonness = np.log(rng.permutation(WIDE) + 1.0)
    out = np.empty((CLASSES + 1, WIDE))
    for row, power in zip(out, rng.uniform(*POWERS, CLASSES + 1), strict=True):
        chances = np.arange(1, WIDE + 1) ** -power
        row[np.argsort(commonness + _ORDERS * rng.normal(size=WIDE))] = chances / chances.sum()
    return out


def states_after(of: Model, tokens: Ints) -> Ints:
    """Rows of the model behind these tokens: of a narrow one each token has its own."""
    return tokens % (len(of) - 1)


def sample(rng: np.random.Generator, of: Model, n: int, length: int = M) -> Ints:
    """[n, length] sequences."""
    below, state, out = of.cumsum(1), np.full(n, len(of) - 1), []
    for _ in range(length):
        chance, token = rng.random(n), np.empty(n, int)
        for row in np.unique(state):
            token[state == row] = np.searchsorted(below[row], chance[state == row])
        out.append(np.minimum(token, of.shape[1] - 1))
        state = states_after(of, out[-1])
    return np.stack(out, 1)


def tempered(of: Model, power: float) -> Model:
    """Another temperature, 1 / power."""
    p = of**power
    return np.asarray(p / p.sum(1, keepdims=True))


def mixed(of: Model, share: float) -> Model:
    """A share of the mass is uniform."""
    return (1 - share) * of + share / of.shape[1]


def copies_draft(of: Model, share: float, place: int = 0) -> Model:
    """A sampler that takes the draft's proposal, the token of that place, unasked, in a share of the steps."""
    out = (1 - share) * of
    out[np.arange(len(out)), np.argpartition(-of, place, 1)[:, place]] += share
    return out


def accepts_bad_draft(of: Model, share: float) -> Model:
    """The same, with a draft that proposes one fixed token."""
    out = (1 - share) * of
    out[:, 7] += share
    return out


def favours(of: Model, times: float) -> Model:
    """A sampler to which the commonest token has so many times its odds."""
    out = of.copy()
    out[:, of.sum(0).argmax()] *= times
    return np.asarray(out / out.sum(1, keepdims=True))


Mistake = Callable[[Model], Model]
#: what speculating requests are sampled by
MISTAKES: Sequence[tuple[str, Mistake]] = (
    ("temperature 0.8 for 1.0", lambda m: tempered(m, 1.25)),
    ("temperature 0.9 for 1.0", lambda m: tempered(m, 1 / 0.9)),
    ("10 % of the mass is uniform", lambda m: mixed(m, 0.1)),
    ("a good draft accepted unasked in 10 % of the steps", lambda m: copies_draft(m, 0.1)),
    ("a good draft accepted unasked in 2 % of the steps", lambda m: copies_draft(m, 0.02)),
    ("a bad draft accepted unasked in 10 % of the steps", lambda m: accepts_bad_draft(m, 0.1)),
    ("a bad draft accepted unasked in 1 % of the steps", lambda m: accepts_bad_draft(m, 0.01)),
    ("one token has 1.75 times its odds", lambda m: favours(m, 1.75)),
)


@dataclass(frozen=True)
class Verdict:
    """Of one self-test."""

    counts: bool  # passed
    log_probs: bool
    unproven: bool

    @property
    def failed(self) -> bool:
        """Is the engine refused."""
        return not (self.counts and self.log_probs)


def run(
    seed: int, mistake: Mistake | None = None, everywhere: bool = False, alpha: float = ALPHA, wide: bool = False
) -> Verdict:
    """One self-test.

    Args:
        seed: of the model and of all samples.
        mistake: of the sampler; None: a right engine.
        everywhere: do plain requests have it, too.
        alpha: error level, shared by both statistics, and by one more that is not simulated.
        wide: has the model a real one's vocabulary.
    """
    rng = np.random.default_rng(seed)
    true = wide_model(rng) if wide else model(rng, SHARPNESS[seed % len(SHARPNESS)])
    wrong = true if mistake is None else mistake(true)
    spec, plain = (_arm(rng, by, true) for by in (wrong, wrong if everywhere else true))
    counts = counts_check(spec, plain, alpha / 3)
    log_probs = evidence_check(spec, plain, true.shape[1], alpha / 3)
    return Verdict(counts.passed, log_probs.passed, log_probs.unproven)


def _arm(rng: np.random.Generator, sampler: Model, true: Model) -> list[Sampled]:
    tokens = sample(rng, sampler, N * PROMPTS)
    first = np.full((len(tokens), 1), len(true) - 1)
    before = np.concatenate([first, states_after(true, tokens[:, :-1])], 1)
    top_ids = _likeliest(true)[before]
    top = np.log(true[before[..., None], top_ids])
    stated = np.log(true[before, tokens])
    return [Sampled(i % PROMPTS, tuple(map(int, row)), stated[i], top[i], top_ids[i]) for i, row in enumerate(tokens)]


def _likeliest(of: Model) -> Ints:
    """[states, TOP] tokens, the likeliest first."""
    found = np.argpartition(-of, TOP, 1)[:, :TOP]
    order = np.argsort(-np.take_along_axis(of, found, 1), 1)
    return np.take_along_axis(found, order, 1)
