"""The loop as an asynchronous trainer would run it, and what changes in its adapter: eight places again, four of them new.

Responses are begun before a weight sync, cut short by it, and go on under the next policy; so every sequence spans two
policy versions, and by the time of the log-prob pass its first half is one version old.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
from torch import Tensor

from minimal_adapter.adapter import Link, MinimalAdapter
from minimal_adapter.loop import Rollouts, Settings, padded
from spec_plugin.actor.control import RolloutControl, RolloutHarvest
from spec_plugin.actor.decoder import find_decoder
from spec_plugin.spans import Span

#: response, its log-probs, and the policy versions of its first and its last token
Part = tuple[list[int], list[float], int, int]


class LaggingAdapter(MinimalAdapter):
    """Rollouts that overlap with training."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.link = LaggingLink(self.front)
        # a phase lasts from one weight sync to the next
        self.control = RolloutControl(self.session, self.link, overlaps=True)
        self.harvest = RolloutHarvest(self.control, lambda: find_decoder(self.policy))
        self._begun: list[Part] | None = None
        self._last_versions: list[int] = []

    # ---- the trainer: half of each response before the weight sync, the rest behind it

    def sync(self) -> None:
        """Begin the next step's responses with the old weights, then send the new ones."""
        if self.engine.version >= 0:
            nothing: Part = ([], [], self.engine.version, self.engine.version)
            prompts = self.sample_prompts()
            self._begun = self.sample([(p, nothing) for p in prompts], self.settings.max_tokens // 2)
        super().sync()

    def generate(self, prompts: Sequence[list[int]]) -> Rollouts:
        """Go on where the weight sync has cut the responses short."""
        nothing: Part = ([], [], self.engine.version, self.engine.version)
        begun = self._begun or [nothing] * len(prompts)
        parts = self.sample(list(zip(prompts, begun, strict=True)), self.settings.max_tokens)
        self._begun = None
        responses, log_probs, first, last = (list(column) for column in zip(*parts, strict=True))
        self._last_versions = last
        rollouts = Rollouts(list(prompts), responses, log_probs, first)
        if self.settings.replay is not None:
            self.settings.replay.mkdir(parents=True, exist_ok=True)
            (self.settings.replay / f"step_{self.step}.json").write_text(json.dumps(asdict(rollouts)))
        return rollouts

    def replayed(self) -> Rollouts | None:
        """Recorded rollouts; no engine of this run knows them."""
        rollouts = super().replayed()
        self._last_versions = [] if rollouts is None else list(rollouts.versions)
        return rollouts

    def sample(self, begun: Sequence[tuple[list[int], Part]], most: int) -> list[Part]:
        """Each response up to ``most`` tokens."""

        async def go_on(index: int, prompt: list[int], part: Part) -> Part:
            tokens, log_probs, first, _ = part
            if len(tokens) >= most or tokens[-1:] == [self.policy.config.eos_token_id]:
                return part
            more = await self.request(index, [*prompt, *tokens])
            kept = most - len(tokens)
            self.sampled([*prompt, *tokens], more[0][:kept], more[2])
            return [*tokens, *more[0][:kept]], [*log_probs, *more[1][:kept]], first, more[2]

        async def everything() -> list[Part]:
            return list(await asyncio.gather(*(go_on(i, *one) for i, one in enumerate(begun))))

        return self.engine.run(everything())

    # ---- the engine says what it sampled, stretch by stretch

    def sampled(self, prompt: list[int], response: list[int], version: int) -> None:
        """One request is complete, or cut short."""
        self.front.sampled(prompt, response, version, None)

    # ---- the log-prob check knows the version of each token

    def check(self, rollouts: Rollouts, recomputed: Tensor) -> None:
        """Both sides' log-probs, and who sampled what."""
        mask = padded(rollouts.log_probs)[1]
        documents, _ = self.documents(rollouts)
        versions, plain = self.control.spans().of(documents, [len(p) for p in rollouts.prompts], mask)
        first, last = torch.tensor(rollouts.versions), torch.tensor(self._last_versions)
        self.session.check_logprobs(
            replace(
                self.batch(rollouts, recomputed),
                **self.versions(first, last, versions),
                speculating=bool((mask & ~plain).any()),
                lag_allowed=True,
                plain=plain,
            )
        )

    def versions(self, first: Tensor, last: Tensor, of_tokens: Tensor) -> dict[str, Tensor]:
        """Policy versions of each sequence's first and last token, as the trainer knows them, and of all, as the engine says."""
        return {"rollout_versions": first, "last_versions": last, "token_versions": of_tokens}


class LaggingLink(Link):
    """The link, with one call more."""

    async def spans(self) -> list[Span]:
        """What was sampled since the last call."""

        async def take() -> list[Span]:
            return self.front.take_spans()

        return await self._there(take())
