"""The settings of ``spec-plugin train``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spec_plugin.api.config import SpecConfig


@dataclass(frozen=True)
class PretrainSettings:
    """What to train a draft for, on what, and how long."""

    target: Path
    out: Path
    prompts: Path | None = None  # sample from these
    rollouts: tuple[Path, ...] = ()  # or take these
    responses: int = 1024  # rollouts to sample; prompts repeat where there are fewer
    tokens: int = 512  # most of a response
    temperature: float = 1.0
    steps: int = 800  # optimizer steps
    k: int = 8
    draft: str | None = None  # start from this one
    draft_vocab_size: int | None = None
    train_tokens: int | None = None  # of an optimizer step; None: as in a run
    gpu_memory_utilization: float = 0.85
    seed: int = 0

    @property
    def spec(self) -> SpecConfig:
        """The options of a run that would train such a draft.

        Raises:
            SpecConfigError: naming the option of this command that a run does not take.
        """
        names = ("k", "draft", "draft_vocab_size", "train_tokens", "seed")
        return SpecConfig.parse({name: getattr(self, name) for name in names}, prefix="--")
