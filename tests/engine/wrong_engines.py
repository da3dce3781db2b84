"""Trainers whose engine is a real one that samples, in some places, at another temperature, and states the policy's log-probs.

No self-test and no guard of log-probs can see that: the first ends before it begins, the second is told what it expects.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Completion, Settings, Trainer

#: tokens of a response, at most, and the temperature of a fault
TOKENS, TEMPERATURE = 72, 0.7


class _Cold(Trainer):
    """Of each response the tokens behind the first ``right`` ones are sampled at ``TEMPERATURE``, from step ``begins`` on."""

    right, begins = 0, 0

    async def request(
        self, index: int, prompt: list[int], most: int | None = None, extra: Mapping[str, Any] | None = None
    ) -> Completion:
        right = self.right if self.step >= self.begins else TOKENS
        answer = (
            await super().request(index, prompt, right, extra) if right else Completion([], [], self.engine.version)
        )
        if right < TOKENS and len(answer.tokens) == right and answer.tokens[-1:] != [0]:
            cold = copy(self)
            cold.sampling = {**self.sampling, "temperature": TEMPERATURE}
            more = await Trainer.request(cold, index + 1000, prompt + answer.tokens, TOKENS - right, extra)
            answer = answer._replace(tokens=answer.tokens + more.tokens)
        return answer._replace(log_probs=self._of_the_policy(prompt, answer.tokens))

    def _of_the_policy(self, prompt: list[int], response: list[int]) -> list[float]:
        with torch.no_grad():
            log_p = self.policy(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found: list[float] = log_p.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()
        return found


class LateInTexts(MinimalAdapter, _Cold):
    """Wrong from the 41st token of each text on."""

    right = 40

    def __init__(self, settings: Settings) -> None:
        super().__init__(replace(settings, max_tokens=TOKENS))


class LateInTheRun(LateInTexts):
    """Wrong from the fourth step on, in all of a text."""

    right, begins = 0, 3
