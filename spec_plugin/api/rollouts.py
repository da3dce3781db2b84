"""Rollouts that are remembered from one phase to the next, for methods that draft from what was sampled before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: phases of one prompt that are kept: the policy moves, and what it said longer ago is no longer what it says
_VISITS = 2
#: rollouts of one prompt and phase that are kept: the last to end, which are the longest, and the ones that others wait for
_SAMPLES = 4
#: phases after which a prompt that did not come back makes room for others
_FORGOTTEN = 512
#: most tokens that travel in one call, 64 MB of them: each call is packed whole and has a time limit of its own
CHUNK_TOKENS = 1 << 24


@dataclass(frozen=True)
class Rollout:
    """One response of the engine; token ids as int32 in the machine's byte order, so that they travel as they are."""

    prompt: bytes
    response: bytes

    @property
    def tokens(self) -> int:
        """Number of prompt and response tokens together."""
        return (len(self.prompt) + len(self.response)) // 4


def chunks(parts: Sequence[Sequence[Rollout]], most_tokens: int = CHUNK_TOKENS) -> Iterator[list[list[Rollout]]]:
    """The same parts again and again, each time with the next rollouts of them: at most so many tokens, or a single rollout."""
    chunk: list[list[Rollout]] = [[] for _ in parts]
    tokens = 0
    for i, part in enumerate(parts):
        for rollout in part:
            if tokens and tokens + rollout.tokens > most_tokens:
                yield chunk
                chunk, tokens = [[] for _ in parts], 0
            chunk[i].append(rollout)
            tokens += rollout.tokens
    if tokens:
        yield chunk


@dataclass(frozen=True)
class _Kept:
    phase: int
    number: int
    tokens: int


class LatestRollouts:
    """Which rollouts to keep: of each prompt some of its last phases, and no more of all prompts than there is room for.

    Prompts come back epoch by epoch, in the same order. Where an epoch has more than there is room for, whoever kept the
    prompts that were used last would always have dropped those that come next, and never find one. So a prompt that is kept
    stays, and a new one finds no room, until one has not come back for long.
    """

    def __init__(self, most_tokens: int) -> None:
        """Begin with none.

        Args:
            most_tokens: of all rollouts, their prompts among them.
        """
        self.most_tokens, self.tokens = most_tokens, 0
        self._prompts: OrderedDict[bytes, list[_Kept]] = OrderedDict()  # the one that was used longest ago first

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
        mine.append(_Kept(phase, number, tokens))
        self.tokens += tokens
        phases = sorted({kept.phase for kept in mine})[-_VISITS:]
        now = [kept for kept in mine if kept.phase == phase]
        surplus = {kept.number for kept in now[:-_SAMPLES]}
        dropped = [self._drop(prompt, k) for k in list(mine) if k.phase not in phases or k.number in surplus]
        while self.tokens > self.most_tokens:
            dropped.append(self._make_room(prompt, phase))
        return dropped

    def _make_room(self, prompt: bytes, phase: int) -> tuple[bytes, int]:
        mine = self._prompts[prompt]
        if mine[0].phase < phase:  # what it said before
            return self._drop(prompt, mine[0])
        oldest, kept = next(iter(self._prompts.items()))
        if kept[-1].phase < phase - _FORGOTTEN:
            return self._drop(oldest, kept[0])
        return self._drop(prompt, mine[-1])

    def _drop(self, prompt: bytes, kept: _Kept) -> tuple[bytes, int]:
        self._prompts[prompt].remove(kept)
        if not self._prompts[prompt]:
            del self._prompts[prompt]
        self.tokens -= kept.tokens
        return prompt, kept.number

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        """Prompts and numbers, those used last at the end."""
        return ((prompt, kept.number) for prompt, all_kept in self._prompts.items() for kept in all_kept)
