"""Which tokens of the trainer's log-prob passes are harvested, within a budget, and which rank keeps which of them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from draft_training.parts import WHOLE

#: of what was read before a response, tokens that are harvested with it; more where more was sampled
_READ = 1024
#: a piece of fewer tokens is not worth its place, unless it is a whole document
_LEAST = 32


@dataclass(frozen=True)
class Piece:
    """Tokens ``start`` to ``stop`` of a document of one forward pass, and the rank that keeps them."""

    index: int  # of the document
    start: int
    stop: int
    rank: int

    def __len__(self) -> int:
        return self.stop - self.start


class HarvestPlan:
    """Which tokens of the log-prob passes are harvested, within a budget, and which rank keeps which of them.

    Where there are more tokens than the budget has room for, stretches at even distances are taken, as by the teeth of a comb
    that is laid on all documents end to end: so each sampled token is as likely as any other, however long its response and
    wherever in it. How many there will be is taken to be as many as in the step before.

    Ranks that run the same documents together each make this plan, and come to the same one.
    """

    def __init__(self, tokens: int = 0, ranks: int = 1, window: int = 1 << 62) -> None:
        """``tokens`` for each of ``ranks``, which share the documents; ``window``: of one stretch, at most. See ``open``."""
        self.ranks, self._window = ranks, window
        self.passed = 0  # tokens of the documents since ``open``, whether they were harvested or not
        self._opened = -1
        self.open(tokens)

    def open(self, tokens: int, expected: int | None = None) -> None:
        """A new budget.

        Args:
            tokens: for each rank.
            expected: tokens that will pass; None: nobody knows, and the first ones are taken.
        """
        self._budget = self.left = self.ranks * tokens
        self.active = tokens > 0
        self._expected, self.passed = expected, 0
        self._opened += self.active  # budgets so far, less one
        self._turn = self._opened  # the same on all ranks, whatever failed on one of them before
        self._phase = random.Random(self._opened).random()

    def close(self) -> None:
        """The log-prob pass is over: nothing is harvested, or counted, until the next ``open``."""
        self.left, self.active = 0, False

    def pieces(self, masks: Sequence[Tensor]) -> list[Piece]:
        """What is harvested of the documents of one forward pass, and taken off the budget.

        Args:
            masks: of each document, [n] bool, True where the policy sampled the token.
        """
        found: list[Piece] = []
        least = min(_LEAST, max(1, min(self._window, self._budget) // 4))
        for index, mask in enumerate(masks):
            low, high = _useful(mask)
            for start, stop in self._teeth(self.passed, high - low):
                stop = min(stop, start + self.left)
                if stop - start < min(least, high - low):
                    continue
                found.append(Piece(index, low + start, low + stop, self._turn % self.ranks))
                self.left -= stop - start
                self._turn += 1
            self.passed += high - low
        return found

    def _teeth(self, before: int, tokens: int) -> Iterator[tuple[int, int]]:
        """Stretches of a document of so many tokens, behind so many of others."""
        if self._expected is None or self._expected <= self._budget:
            most = min(self.left, self._window if self._expected is None else self.left)
            start = random.Random(self._opened + before).randint(0, max(0, tokens - most))
            if tokens > 0 and most > 0:
                yield start, min(tokens, start + most)
            return
        width = max(1, min(self._window, self._budget))
        stride = width * self._expected / self._budget
        if tokens <= width * WHOLE:  # cut, it would lack its beginning
            if (before - self._phase * stride) % stride < width:
                yield 0, tokens
            return
        tooth = math.floor((before - width) / stride - self._phase)
        while (begin := (tooth + self._phase) * stride - before) < tokens:
            if begin + width > 0:
                yield max(0, int(begin)), min(tokens, int(begin) + width)
            tooth += 1


def _useful(mask: Tensor) -> tuple[int, int]:
    """First and last token, and one beyond, of what a draft learns from: what was sampled, and some of what was read before."""
    sampled = mask.nonzero()
    if not len(sampled):
        return 0, 0
    first, last = int(sampled[0]), int(sampled[-1])
    return max(0, first - max(_READ, len(sampled))), last + 1
