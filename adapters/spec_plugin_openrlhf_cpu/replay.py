"""An OpenRLHF agent that records what was rolled out, or gives back what a former run recorded."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from openrlhf.utils.agent import SingleTurnAgentExecutor


class ReplayExecutor(SingleTurnAgentExecutor):  # type: ignore[misc]
    """The n-th response to a prompt is always the recorded one; what is not recorded yet is sampled and recorded."""

    folder: Path
    reward_file: str

    def __init__(self) -> None:
        super().__init__(self.reward_file)
        self._asked: Counter[str] = Counter()

    async def execute(self, prompt: str, label: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """OpenRLHF's response dict."""
        number, self._asked[prompt] = self._asked[prompt], self._asked[prompt] + 1
        file = self.folder / f"{prompt.replace(' ', '_')}-{number}.json"
        if file.exists():
            recorded: dict[str, Any] = json.loads(file.read_text())
            recorded["action_ranges"] = [tuple(span) for span in recorded["action_ranges"]]
            return recorded
        response: dict[str, Any] = await super().execute(prompt, label, *args, **kwargs)
        file.write_text(json.dumps(response))
        return response
