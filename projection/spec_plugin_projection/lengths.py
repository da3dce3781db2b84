"""How long responses are: a distribution from which a step's responses are drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from spec_plugin.api.errors import SpecConfigError
from spec_plugin.plan.text_files import text_of

#: of the logarithm, where only a mean is given: the 99th percentile is about five times the median
SIGMA = 0.7
#: of a response that is simulated
MOST_TOKENS = 1e9
_STEPS = 512  # of the quantile function that is kept
_NORMAL = np.array([NormalDist().inv_cdf((i + 0.5) / _STEPS) for i in range(_STEPS)])


@dataclass(frozen=True)
class Lengths:
    """Response lengths by their quantile function, on an even grid of probabilities."""

    quantiles: tuple[float, ...]  # tokens, ascending
    described: str

    def drawn(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Lengths of ``count`` responses, [count] float, at least 1: one of each equal share of the distribution, shuffled.

        So the longest response hardly differs from draw to draw, as in a step of thousands of responses it hardly does.
        """
        places = (np.arange(count) + rng.random(count)) / count
        grid = (np.arange(len(self.quantiles)) + 0.5) / len(self.quantiles)
        found = np.maximum(1.0, np.round(np.interp(places, grid, self.quantiles)))
        rng.shuffle(found)
        return found

    @property
    def mean(self) -> float:
        """Mean length of a response, in tokens."""
        return float(np.mean(self.quantiles))

    @property
    def longest(self) -> float:
        """Length of the longest response, in tokens."""
        return self.quantiles[-1]


def lognormal(mean: float, longest: float, sigma: float = SIGMA) -> Lengths:
    """Logarithms normally distributed, cut off at ``longest``, where trainers end a response; ``mean`` is that of what is left.

    Raises:
        SpecConfigError: if no such distribution exists.
    """
    if not 1 <= mean <= longest <= MOST_TOKENS:
        raise SpecConfigError(
            f"a mean response of {mean:g} tokens must lie between 1 and the longest, {longest:g}, and that below {MOST_TOKENS:g}"
        )

    def cut(median: float) -> np.ndarray:
        return np.minimum(longest, median * np.exp(sigma * _NORMAL))

    low, high = math.log(mean) - 10, math.log(longest) + 10
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if cut(math.exp(middle)).mean() < mean else (low, middle)
    values = cut(math.exp(high))
    return Lengths(tuple(values), f"lognormal, mean {mean:g}, sigma {sigma:g}, cut off at {longest:g}")


def percentiles(points: Mapping[float, float]) -> Lengths:
    """Through given percentiles, linear between them, flat below the first and above the last.

    Args:
        points: percentile, 0 to 100 -> tokens.

    Raises:
        SpecConfigError: if they are not a distribution.
    """
    known = sorted(points.items())
    tokens = [value for _, value in known]
    whole = all(0 <= p <= 100 and 1 <= length <= MOST_TOKENS for p, length in known)  # NaN is neither
    if len(known) < 2 or not whole or tokens != sorted(tokens):
        raise SpecConfigError(
            f"percentiles {dict(known)}: at least two, of 0 to 100, with lengths of 1 to {MOST_TOKENS:g} tokens that do not fall"
        )
    grid = (np.arange(_STEPS) + 0.5) / _STEPS * 100
    values = np.interp(grid, [p for p, _ in known], tokens)
    return Lengths(tuple(values), "percentiles " + ", ".join(f"{p:g}: {v:g}" for p, v in known))


def from_responses(tokens: Sequence[float], described: str) -> Lengths:
    """As given responses are.

    Raises:
        SpecConfigError: if there is none, or one is no length.
    """
    if not tokens or not all(_is_length(t) for t in tokens):
        raise SpecConfigError(f"{described}: expected a list of numbers of tokens, each of 1 to {MOST_TOKENS:g}")
    return Lengths(tuple(float(t) for t in sorted(tokens)), f"{described}, {len(tokens)} responses")


def _is_length(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value <= MOST_TOKENS


def from_file(file: Path) -> Lengths:
    """A JSON list of numbers of tokens, or a text file with one in each line.

    Raises:
        SpecConfigError: if it is neither.
    """
    try:
        text = text_of(file)
        tokens = json.loads(text) if text.lstrip().startswith("[") else [float(line) for line in text.split()]
    except (OSError, ValueError, RecursionError, SpecConfigError) as error:
        raise SpecConfigError(f"lengths {file}: {error}; a JSON list of tokens, or one number a line") from error
    return from_responses(tokens, str(file))
