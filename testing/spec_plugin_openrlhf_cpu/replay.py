"""An OpenRLHF agent that records what was rolled out, or gives back what a former run recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from openrlhf.utils.agent import SingleTurnAgentExecutor


class ReplayExecutor(SingleTurnAgentExecutor):  # type: ignore[misc]
    """The n-th request is always answered by the recorded response, with its own prompt; what is not recorded is sampled.

    By number and not by prompt: OpenRLHF shuffles its prompts anew in each run, whatever ``--train.seed`` says.
    """

    folder: Path
    reward_file: str

    def __init__(self) -> None:
        super().__init__(self.reward_file)
        self._asked = 0

    async def execute(self, prompt: str, label: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """OpenRLHF's response dict, from the record if there is one, else sampled and recorded."""
        number, self._asked = self._asked, self._asked + 1
        file = self.folder / f"{number}.json"
        if file.exists():
            recorded: dict[str, Any] = json.loads(file.read_text())
            recorded["action_ranges"] = [tuple(span) for span in recorded["action_ranges"]]
            return recorded
        response: dict[str, Any] = await super().execute(prompt, label, *args, **kwargs)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(response))
        partial.rename(file)  # a kill in between leaves nothing that the next run would read
        return response
