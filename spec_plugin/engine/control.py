"""The control group: a few requests of each drafted phase sample a stretch without drafts, beside all the others.

What they show is what two correct implementations of the policy differ by *now*: the provenance guard needs it where a run
has no phases without drafts, and to tell drift from a fault. A stretch and not a whole request, since one that is never
drafted for would be the last of its phase; anywhere in the response, since differences grow with the context.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

#: tokens of a stretch
TOKENS = 64
#: the name under which adapters hand ``Control.first`` on, beside a response
PLAIN_FROM = "spec_plain_from"
#: what the newest response weighs in the mean length
_NEWEST = 0.05


@dataclass(frozen=True)
class Control:
    """A stretch of one response."""

    first: int  # its first token, counted from the response's
    k: int  # most tokens drafted in a step

    @property
    def extra_args(self) -> dict[str, list[int]]:
        """For ``SamplingParams``. Wider than the stretch: drafts under way when it begins, or ends, are none of it."""
        slack = 2 * (self.k + 1)
        return {"spec_off": [max(0, self.first - slack), self.first + TOKENS + slack]}


class ControlGroup:
    """Who is in it: a share of the requests, evenly spaced."""

    def __init__(self, share: float, k: int, seed: int) -> None:
        """Begin anywhere between two of them.

        Args:
            share: of the requests.
            k: most tokens drafted in a step.
            seed: of the group's own random stream.
        """
        self._share, self._k = share, k
        self._rng = random.Random(seed)
        self._due = self._rng.random()
        self._length = 0.0  # mean of the responses

    def draw(self) -> Control | None:
        """For the next request: its stretch, or None."""
        self._due += self._share
        if self._due < 1.0:
            return None
        self._due -= 1.0
        places = max(1, int(self._length) // TOKENS)  # the last one is whole in a response of mean length
        return Control(TOKENS * self._rng.randrange(places), self._k)

    def ended(self, tokens: int) -> None:
        """A response of so many tokens is complete."""
        self._length += (tokens - self._length) * (_NEWEST if self._length else 1.0)


def plain_tokens(mask: Tensor, firsts: Sequence[int | None]) -> Tensor:
    """Which tokens of a batch the control group sampled without drafts, [B, T] bool.

    Args:
        mask: [B, T] bool; the first True of a row is the response's first token.
        firsts: ``Control.first`` of each sequence, None or negative for those that are not in the group.
    """
    plain = mask.new_zeros(mask.shape)
    for row, first in enumerate(firsts):
        if first is not None and first >= 0 and bool(mask[row].any()):
            begin = int(mask[row].int().argmax()) + int(first)
            plain[row, begin : begin + TOKENS] = True
    return plain
