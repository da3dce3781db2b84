"""Agent loops for verl: an answer, a word of a "tool", and another answer with options that cannot draft; sums in turns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

TOOL = (40, 41, 42)  # tokens that the policy did not sample
TURN = 12  # most tokens of a turn


#: what somebody else says before a turn, as tokens, and options of the turn
Turn = tuple[Sequence[int], Mapping[str, Any]]


class _Conversation(AgentLoopBase):  # type: ignore[misc]
    """Chosen in the file of ``rollout.agent.agent_loop_config_path``."""

    async def _converse(
        self, messages: list[dict[str, Any]], sampling_params: Mapping[str, Any], turns: Sequence[Turn]
    ) -> AgentLoopOutput:
        """One rollout; what somebody else says is masked out."""
        prompt = list(await self.ct_build_initial_tokens(messages))
        response: list[int] = []
        mask: list[int] = []
        log_probs: list[float] = []
        stated = True
        for told, more in turns:
            response, mask, log_probs = response + list(told), mask + [0] * len(told), log_probs + [0.0] * len(told)
            output = await self.server_manager.generate(
                request_id=uuid4().hex,
                prompt_ids=prompt + response,
                sampling_params={**sampling_params, **more},
            )
            response, mask = response + output.token_ids, mask + [1] * len(output.token_ids)
            stated, log_probs = stated and bool(output.log_probs), log_probs + (output.log_probs or [])
        most = self.rollout_config.response_length
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=response[:most],
            response_mask=mask[:most],
            response_logprobs=log_probs[:most] if stated else None,
            num_turns=2 * len(turns),
            metrics={"num_preempted": -1},
            extra_fields={**output.extra_fields, "turn_scores": [], "tool_rewards": []},
        )


class TwoTurns(_Conversation):
    """An answer, a tool's tokens, another answer whose options are not on the lossless allow-list."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        """One rollout."""
        turns: list[Turn] = [((), {"max_tokens": TURN}), (TOOL, {"max_tokens": TURN, "stop": ["never said"]})]
        return await self._converse(list(kwargs["raw_prompt"]), sampling_params, turns)


class MoreSums(_Conversation):
    """The quickstart's sum, and two more of the user's in the same conversation; no template knows its words."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        """One rollout."""
        messages = list(kwargs["raw_prompt"])
        first = messages[-1]["content"]
        turns: list[Turn] = [((), {"max_tokens": 80})]
        for factor in (2, 3):
            a, b = (100 + int(number) * factor * 37 % 900 for number in re.findall(r"\d+", first)[:2])
            asked = re.sub(r"\d+", "{}", first).format(a, b)
            told = self.tokenizer.encode(f"\n<|user|>{asked}<|assistant|>", add_special_tokens=False)
            turns.append((told, {"max_tokens": 80}))
        return await self._converse(messages, sampling_params, turns)
