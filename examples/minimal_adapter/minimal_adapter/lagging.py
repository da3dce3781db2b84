"""The loop as an asynchronous trainer would run it. Its adapter is that of the loop, with one word: the rollouts overlap.

Responses are begun before a weight sync, cut short by it, and go on under the next policy; so every sequence spans two
policy versions, and by the time of the log-prob pass its first half is one version old.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts


class PartialResponse(NamedTuple):
    tokens: list[int]
    log_probs: list[float]
    first: int  # policy version of its first token
    last: int  # and of its last


class LaggingAdapter(MinimalAdapter):
    """Rollouts that overlap with training: they end with the next weight sync."""

    overlaps = True
    _begun: list[PartialResponse] | None = None

    def sync(self) -> None:
        """Begin the next step's responses with the old weights, then send the new ones."""
        if self.engine.version >= 0:
            prompts = self.sample_prompts()
            self._begun = self.sample(prompts, [self._nothing()] * len(prompts), self.settings.max_tokens // 2)
        super().sync()

    def generate(self, prompts: Sequence[list[int]]) -> Rollouts:
        """Go on where the weight sync has cut the responses short."""
        begun, self._begun = self._begun or [self._nothing()] * len(prompts), None
        parts = self.sample(prompts, begun, self.settings.max_tokens)
        return self.recorded(Rollouts(list(prompts), *map(list, zip(*parts, strict=True))))

    def _nothing(self) -> PartialResponse:
        return PartialResponse([], [], self.engine.version, self.engine.version)

    def sample(
        self, prompts: Sequence[list[int]], begun: Sequence[PartialResponse], most: int
    ) -> list[PartialResponse]:
        """Each response up to ``most`` tokens."""

        async def go_on(index: int, prompt: list[int], part: PartialResponse) -> PartialResponse:
            if len(part.tokens) >= most or part.tokens[-1:] == [self.policy.config.eos_token_id]:
                return part
            more = await self.request(index, [*prompt, *part.tokens], most - len(part.tokens))
            return PartialResponse(
                [*part.tokens, *more.tokens], [*part.log_probs, *more.log_probs], part.first, more.version
            )

        async def everything() -> list[PartialResponse]:
            together = enumerate(zip(prompts, begun, strict=True))
            return list(await asyncio.gather(*(go_on(i, prompt, part) for i, (prompt, part) in together)))

        return self.engine.run(everything())
