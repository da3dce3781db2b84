"""What verl 0.9.1 calls of vLLM's that vLLM 0.29, the newest with a CPU build, does not have yet: LoRA adapters need it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

NAME = "get_unstacked_mapper"  # verl calls it of every vLLM since 0.25


def unstacked(mapper: Any) -> Any:
    """The mapper without its stacking of q, k and v: the tensors of an adapter have names of their own."""
    return replace(mapper, orig_to_new_stacked={})


def add_unstacked_mapper() -> None:
    """Give vLLM's mappers that method where they lack it."""
    from vllm.model_executor.models.utils import WeightsMapper

    if not hasattr(WeightsMapper, NAME):
        setattr(WeightsMapper, NAME, unstacked)
