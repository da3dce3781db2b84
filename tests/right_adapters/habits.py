"""What trainers do besides sampling once for each prompt and training on all of it; none of it is wrong.

Each is a loop, with ``driver``: what the kit has to know of it. Where the adapter must do something about it, too, that is in
the class of the same name with ``Adapter`` behind it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar

import torch
from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts, Settings, Trainer, reward
from spec_plugin_conformance.driver import RunSettings
from torch import Tensor

from spec_plugin.adapter import Responses

_TEMPERATURE = 0.7
#: tokens of each turn
_TURN = Settings.max_tokens // 2
#: share of what the policy's MLPs give that is dropped in updates
_DROPPED = 0.1
#: prompts of a validation
_VALIDATED = 4
_LETTERS = 26


class Habit(Trainer):
    #: attributes of the driver; mappings are merged
    driver: ClassVar[Mapping[str, Any]] = {}


class HabitsDriver(driver.Driver):
    """Runs such a loop without the flag, and such an adapter with it."""

    loop = ""
    options: Mapping[str, Any] = {}

    def command(self, run: RunSettings) -> list[str]:
        more = [word for name, value in self.options.items() for word in (f"--{name}", str(value))]
        return [*super().command(run), "--loop", self.loop, *more]

    def dropped(self, run: RunSettings) -> list[list[int]]:
        file = run.out / "dropped.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


class Cooler(Habit):
    """Samples at another temperature than 1, of which its own log-probs are, too."""

    driver: ClassVar[Mapping[str, Any]] = {
        "requests": {"max_tokens": Settings.max_tokens, "temperature": _TEMPERATURE},
        "options": {"temperature": _TEMPERATURE},
    }


class DropsOut(Habit):
    """Drops out in its updates, and in no log-prob pass."""

    def update(self, rollouts: Rollouts, old: Tensor, advantages: Tensor) -> float:
        layers = [module for name, module in self.policy.named_modules() if name.endswith(".mlp")]
        assert layers, "a policy with MLPs"
        hooks = [layer.register_forward_hook(_drop_out) for layer in layers]
        try:
            return super().update(rollouts, old, advantages)
        finally:
            for hook in hooks:
                hook.remove()


def _drop_out(layer: Any, inputs: Any, output: Tensor) -> Tensor:
    return torch.nn.functional.dropout(output, _DROPPED)


class Validates(Habit):
    """Answers other prompts greedily before each rollout, and trains on none of it."""

    driver: ClassVar[Mapping[str, Any]] = {"validation": {"temperature": 0.0}}

    def generate(self, prompts: Sequence[list[int]]) -> Rollouts:
        rollouts_sampling, self.sampling = self.sampling, {**self.sampling, "temperature": 0.0}

        async def answers() -> None:
            asked = ([2 + i, 3, 4 + self.step] for i in range(_VALIDATED))
            await asyncio.gather(*(self.request(1000 + i, prompt, _TURN) for i, prompt in enumerate(asked)))

        try:
            self.engine.run(answers())
        finally:
            self.sampling = rollouts_sampling
        return super().generate(prompts)


class Filtered(Habit):
    """Drops before its loss the group of answers whose rewards are most alike, as DAPO does, and says so in its log."""

    def recorded(self, rollouts: Rollouts) -> Rollouts:
        size = self.settings.group
        rewards = torch.tensor([reward(r, self.policy.config.vocab_size) for r in rollouts.responses]).view(-1, size)
        worst = int(rewards.std(-1).argmin())
        rows = list(zip(rollouts.prompts, rollouts.responses, strict=True))[worst * size : (worst + 1) * size]
        with (self.settings.out / "dropped.jsonl").open("a") as log:
            log.writelines(f"{json.dumps([*prompt, *response])}\n" for prompt, response in rows)
        kept = {name: of[: worst * size] + of[(worst + 1) * size :] for name, of in asdict(rollouts).items()}
        return super().recorded(Rollouts(**kept))


class MultiTurn(Habit):
    """Asks a tool in the middle of each response. It reads text that does not tell all tokens; ids are never made from text."""

    driver: ClassVar[Mapping[str, Any]] = {"requests": {"max_tokens": _TURN}}

    def generate(self, prompts: Sequence[list[int]]) -> Rollouts:
        async def conversation(index: int, prompt: list[int]) -> tuple[list[int], list[float | None], int, int]:
            first = await self.request(index, prompt, _TURN)
            said = _tool(_text(first.tokens))
            second = await self.request(index + len(prompts), [*prompt, *first.tokens, *said], _TURN)
            log_probs = [*first.log_probs, *[None] * len(said), *second.log_probs]
            return [*first.tokens, *said, *second.tokens], log_probs, first.version, second.version

        async def everything() -> list[tuple[list[int], list[float | None], int, int]]:
            return await asyncio.gather(*(conversation(i, prompt) for i, prompt in enumerate(prompts)))

        rows: Any = map(list, zip(*self.engine.run(everything()), strict=True))
        return self.recorded(Rollouts(list(prompts), *rows))

    def loss(self, rollouts: Rollouts, old: Tensor, advantages: Tensor) -> Tensor:
        """The loop's own, over what the policy sampled."""
        mask = sampled(rollouts)
        ratio = (self.policy_log_probs(rollouts) - old).exp()
        return -(ratio * advantages[:, None] * mask).sum() / mask.sum()


class MultiTurnAdapter(MultiTurn, MinimalAdapter):
    def documents(self, rollouts: Rollouts) -> tuple[list[Tensor], list[Tensor]]:
        documents, masks = super().documents(rollouts)
        for prompt, mask, row in zip(rollouts.prompts, masks, sampled(rollouts), strict=True):
            mask[len(prompt) :] = row[: len(mask) - len(prompt)]
        return documents, masks

    def responses(self, rollouts: Rollouts) -> Responses:
        stated = [[0.0 if value is None else value for value in row] for row in rollouts.log_probs]
        return replace(super().responses(replace(rollouts, log_probs=stated)), mask=sampled(rollouts))


def sampled(rollouts: Rollouts) -> Tensor:
    """[B, T] bool: what the policy has sampled of responses; what a tool has said has no log-probs."""
    rows = [torch.tensor([value is not None for value in row]) for row in rollouts.log_probs]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _text(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token % _LETTERS) for token in tokens)


def _tool(text: str) -> list[int]:
    return [2 + ord(letter) % _LETTERS for letter in text[-3:]]
