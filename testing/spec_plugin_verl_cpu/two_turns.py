"""Agent loops for verl: an answer, a word of a "tool", and another answer with options that cannot draft; sums in turns."""

from __future__ import annotations

import re
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

TOOL = (40, 41, 42)  # tokens that the policy did not sample
TURN = 12  # most tokens of a turn


class TwoTurns(AgentLoopBase):  # type: ignore[misc]
    """Sample, append a tool's tokens, sample again; chosen in the file of ``rollout.agent.agent_loop_config_path``."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        """One rollout; the tool's tokens are masked out, and the second turn's options are not on the allow-list."""
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        response: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        turns: tuple[dict[str, Any], ...] = (
            {},
            {"stop": ["never said"]},
        )  # the second is not on the lossless allow-list
        for turn, more in enumerate(turns):
            output = await self.server_manager.generate(
                request_id=uuid4().hex,
                prompt_ids=[*prompt, *response],
                sampling_params={**sampling_params, "max_tokens": TURN, **more},
            )
            response += output.token_ids
            mask += [1] * len(output.token_ids)
            logprobs += output.log_probs or [0.0] * len(output.token_ids)
            if turn == 0:
                response, mask, logprobs = response + list(TOOL), mask + [0] * len(TOOL), logprobs + [0.0] * len(TOOL)
        fields = {**output.extra_fields, "turn_scores": [], "tool_rewards": []}
        metrics: dict[str, Any] = {"num_preempted": -1}
        return AgentLoopOutput(
            prompt_ids=list(prompt),
            response_ids=response,
            response_mask=mask,
            response_logprobs=logprobs,
            num_turns=4,
            metrics=metrics,
            extra_fields=fields,
        )


class MoreSums(AgentLoopBase):  # type: ignore[misc]
    """The quickstart's sum, and two more of the user's in the same conversation; no template knows its words."""

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        """One conversation of three turns; what the user says is masked out."""
        messages = list(kwargs["raw_prompt"])
        prompt = await self.ct_build_initial_tokens(messages)
        numbers = [int(word) for word in re.findall(r"\d+", messages[-1]["content"])]
        response: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        for turn in range(3):
            if turn:
                a, b = (100 + (n * (turn + 1) * 37) % 900 for n in numbers[:2])
                asked = re.sub(r"\d+", "{}", messages[-1]["content"]).format(a, b)
                told = self.tokenizer.encode(f"\n<|user|>{asked}<|assistant|>", add_special_tokens=False)
                response, mask, logprobs = response + told, mask + [0] * len(told), logprobs + [0.0] * len(told)
            output = await self.server_manager.generate(
                request_id=uuid4().hex,
                prompt_ids=[*prompt, *response],
                sampling_params={**sampling_params, "max_tokens": 80},
            )
            response, mask = response + output.token_ids, mask + [1] * len(output.token_ids)
            logprobs += output.log_probs or [0.0] * len(output.token_ids)
        most = self.rollout_config.response_length
        return AgentLoopOutput(
            prompt_ids=list(prompt),
            response_ids=response[:most],
            response_mask=mask[:most],
            response_logprobs=logprobs[:most],
            num_turns=6,
            metrics={"num_preempted": -1},
            extra_fields={**output.extra_fields, "turn_scores": [], "tool_rewards": []},
        )
