"""Rollouts that are remembered from one phase to the next, for methods that draft from what was sampled before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

#: phases of one prompt that are kept: the policy moves, and what it said longer ago is no longer what it says
_VISITS = 2


@dataclass(frozen=True)
class Rollout:
    """One response of the engine; token ids as int32 in the machine's byte order, so that they travel as they are."""

    prompt: bytes
    response: bytes

    @property
    def tokens(self) -> int:
        """Of both."""
        return (len(self.prompt) + len(self.response)) // 4


class Latest:
    """Which rollouts to keep: of each prompt those of its last phases, and of all prompts those that were used last."""

    def __init__(self, most_tokens: int, visits: int = _VISITS) -> None:
        """Begin with none.

        Args:
            most_tokens: of all rollouts, their prompts among them.
            visits: phases of one prompt.
        """
        self.most_tokens, self.tokens, self._visits = most_tokens, 0, visits
        self._prompts: OrderedDict[bytes, list[tuple[int, int, int]]] = OrderedDict()  # phase, number, tokens

    def add(self, prompt: bytes, number: int, tokens: int, phase: int) -> list[tuple[bytes, int]]:
        """Keep one more.

        Args:
            prompt: what it answers.
            number: its own, for the caller.
            tokens: of prompt and response.
            phase: that sampled it; they come in order.

        Returns:
            The prompts and numbers of those that are kept no longer, which may be this one.
        """
        mine = self._prompts.setdefault(prompt, [])
        self._prompts.move_to_end(prompt)
        mine.append((phase, number, tokens))
        self.tokens += tokens
        kept = sorted({visit for visit, _, _ in mine})[-self._visits :]
        dropped = [(prompt, rollout) for rollout in mine if rollout[0] not in kept]
        mine[:] = [rollout for rollout in mine if rollout[0] in kept]
        excess = self.tokens - sum(rollout[2] for _, rollout in dropped) - self.most_tokens
        while excess > 0 and self._prompts:
            oldest = next(iter(self._prompts))
            rollout = self._prompts[oldest].pop(0)
            if not self._prompts[oldest]:
                del self._prompts[oldest]
            dropped.append((oldest, rollout))
            excess -= rollout[2]
        self.tokens -= sum(rollout[2] for _, rollout in dropped)
        return [(of, rollout[1]) for of, rollout in dropped]

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        """Prompts and numbers, those used last at the end."""
        return ((prompt, number) for prompt, kept in self._prompts.items() for _, number, _ in kept)
