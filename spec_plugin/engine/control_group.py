"""The control group: a few requests of each drafted phase sample a stretch without drafts, beside all the others.

What they show is what two correct implementations of the policy differ by *now*: the provenance guard needs it where a run
has no phases without drafts, and to tell drift from a fault. A stretch and not a whole request, since one that is never
drafted for would be the last of its phase; anywhere in the response, since differences grow with the context.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

#: tokens of a stretch
TOKENS = 64
#: requests of the group from which on a phase has some at once, and phases after which it has fewer
_TOGETHER = 4
#: what the newest response weighs in the mean length
_NEWEST = 0.05


@dataclass(frozen=True)
class ControlStretch:
    """The ``TOKENS`` tokens of one response that are sampled without drafts."""

    first: int  # its first token, counted from the response's
    k: int  # most tokens drafted in a step

    @property
    def extra_args(self) -> dict[str, list[int]]:
        """For ``SamplingParams``; it begins as much earlier as drafts may be under way: at its end there are none."""
        return {"spec_off": [max(0, self.first - 2 * (self.k + 1)), self.first + TOKENS]}

    def span(self, prompt: int, tokens: int) -> tuple[int, int]:
        """[first, end) of the stretch, counted from the prompt's first token; (0, 0) if the response was too short.

        Args:
            prompt: tokens of the request's prompt.
            tokens: of its response.
        """
        until = min(tokens, self.first + TOKENS)
        return (prompt + self.first, prompt + until) if until > self.first else (0, 0)


class ControlGroup:
    """Chooses a share of the requests: evenly spaced, or the first ones of a phase.

    Where requests wait for a place in the engine, one that is sampled without drafts is the last of its phase unless it is
    among the first. Several at once cost no more than one, so of small phases only every fourth has some: the others have none
    beside whose steps nothing can be timed. In verl's quickstart (48 answers of 46 tokens, 8 at once) one somewhere in each
    phase took a fifth of the generation.
    """

    def __init__(self, share: float, k: int, seed: int) -> None:
        """Start at a random offset.

        Args:
            share: of the requests.
            k: most tokens drafted in a step.
            seed: of the group's own random stream.
        """
        self.share, self._k = share, k
        self.first = True  # and not evenly spaced
        self._drawn = self._expected = 0  # requests of this phase, and of the last one that had some
        self._waited = 0  # phases since one had some of the group
        self._now = True  # has this one
        self._rng = random.Random(seed)
        self._due = self._rng.random()
        self._length = 0.0  # mean of the responses

    def begin(self) -> None:
        """A phase begins, of about as many requests as the one before."""
        if self._drawn:
            self._expected, self._drawn, self._waited = self._drawn, 0, self._waited + 1

    def draw(self) -> ControlStretch | None:
        """The stretch of the next request, or None if that is not in the group."""
        self._due += self.share
        self._drawn += 1
        to_come = max(0, self._expected - self._drawn) if self.first else 0
        due = self._due + self.share * to_come
        if self._drawn == 1:
            self._now = not to_come or due >= _TOGETHER or self._waited >= _TOGETHER
        if due < 1.0 or not self._now:
            return None
        self._due, self._waited = self._due - 1.0, 0
        places = max(1, int(self._length) // TOKENS)  # the last one is whole in a response of mean length
        return ControlStretch(TOKENS * self._rng.randrange(places), self._k)

    def ended(self, tokens: int) -> None:
        """Update the mean length, from which ``draw`` chooses places, by a complete response."""
        self._length += (tokens - self._length) * (_NEWEST if self._length else 1.0)
