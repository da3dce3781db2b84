"""OpenRLHF agents that record what was rolled out, or give back what a former run recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor
from spec_plugin_conformance import calculator


class Replay(AgentExecutorBase):  # type: ignore[misc]
    """The n-th request is always answered by the recorded response, with its own prompt; what is not recorded is sampled.

    By number and not by prompt: OpenRLHF shuffles its prompts anew in each run, whatever ``--train.seed`` says.
    """

    folder: Path | None  # None: nothing is recorded
    _asked = 0

    async def execute(self, prompt: str, label: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """OpenRLHF's response dict, from the record if there is one, else sampled and recorded."""
        number, self._asked = self._asked, self._asked + 1
        file = self.folder / f"{number}.json" if self.folder is not None else None
        if file is not None and file.exists():
            recorded: dict[str, Any] = json.loads(file.read_text())
            recorded["action_ranges"] = [tuple(span) for span in recorded["action_ranges"]]
            return recorded
        response: dict[str, Any] = await super().execute(prompt, label, *args, **kwargs)
        if file is not None:
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(response))
            partial.rename(file)  # a kill in between leaves nothing that the next run would read
        return response


class ReplayExecutor(Replay, SingleTurnAgentExecutor):  # type: ignore[misc]
    """One turn, and a reward by a function of the user's."""

    reward_file: str

    def __init__(self) -> None:
        super().__init__(self.reward_file)


class Calculator(AgentInstanceBase):  # type: ignore[misc]
    """An environment that answers the calls of a calculator, up to two of them."""

    def __init__(self) -> None:
        self._left = 2

    async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """What it says to a turn of the policy's; the reward is the share of different characters in it, in 64ths."""
        said = state_dict["action_text"]
        told = calculator.answer(said) if self._left else None
        self._left -= 1
        reward = torch.tensor(round(64 * len(set(said)) / max(1, len(said))) / 64)
        return {
            "rewards": reward,
            "scores": reward.item(),
            "environment_feedback": told or "",
            "done": told is None,
            "extra_logs": {"turns": 2.0 - self._left},
        }


class ReplayTurns(Replay, MultiTurnAgentExecutor):  # type: ignore[misc]
    """Up to three turns, with a calculator between them."""

    def __init__(self) -> None:
        super().__init__(Calculator)
