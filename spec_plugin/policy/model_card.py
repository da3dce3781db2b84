"""The README.md beside a draft: what it drafts for, how well, what it learnt from, and how it is served."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spec_plugin.step_cost.chances import tokens_per_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelCard:
    """What is known of a draft; lists of chances have one entry for each drafted token, given those before it."""

    target: str  # the policy's path or name
    method: str  # vLLM's name of it
    trained_on: str  # in words
    predicted: Sequence[float] = ()  # by replay on text that it was not trained on
    measured: Sequence[float] = ()  # by vLLM on samples
    command: str = ""  # that made it
    served: str = "."  # the folder that vLLM loads, beside the card

    @property
    def text(self) -> str:
        """Markdown, with the hub's own fields before it."""
        k = max(1, len(self.measured or self.predicted))
        name = self.target if self.target.count("/") == 1 and not self.target.startswith((".", "/", "~")) else None
        tags = f"tags: [speculative-decoding, {self.method}, vllm]"
        head = ["---", *([f"base_model: {name}"] if name else []), tags, "---", ""]
        served = f'{{"method": "{self.method}", "model": "{self.served}", "num_speculative_tokens": {k}}}'
        lines = [
            f"# Draft for {self.target}",
            "",
            f"A draft for speculative decoding ({self.method}), trained by spec-plugin on {self.trained_on}. It proposes tokens, "
            "and the target verifies each of them: samples are the target's own.",
            "",
            *(_row("Acceptance length, predicted on text that it was not trained on", self.predicted)),
            *(_row("Acceptance length, measured by vLLM", self.measured)),
            "## Use",
            "",
            f"In a run: `spec.draft={self.served}`, this folder's path before it. In vLLM alone:",
            "",
            f"    --speculative-config '{served}'",
            "",
            *(["## Made by", "", f"    {self.command}", ""] if self.command else []),
        ]
        return "\n".join([*head, *lines])

    def write(self, folder: Path) -> None:
        """As ``README.md`` in this folder."""
        partial = folder / "README.md.partial"
        try:
            partial.write_text(self.text, encoding="utf-8", errors="replace")
            os.replace(partial, folder / "README.md")
        except OSError as error:  # the draft is what matters
            logger.warning("spec-plugin: the draft's README.md could not be written: %s", error)


def _row(title: str, chances: Sequence[float]) -> list[str]:
    if not chances:
        return []
    ks = range(1, len(chances) + 1)
    head = "| drafted tokens | " + " | ".join(map(str, ks)) + " |"
    row = "| tokens a step | " + " | ".join(f"{tokens_per_step(chances, k):.2f}" for k in ks) + " |"
    return [f"{title}:", "", head, "| --- " * (len(ks) + 1) + "|", row, ""]
