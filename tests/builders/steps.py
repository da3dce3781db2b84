"""Steps that were not alike, as the step log tells them."""

from __future__ import annotations

from spec_plugin.api.events import StepTiming


def mixed_steps(batch: float, k: int, prompts: bool, total: float, steps: int, drafted: int) -> StepTiming:
    """So many steps, which took ``total`` seconds together; ``drafted`` of their requests had a draft."""
    return StepTiming(batch, k, False, total / steps, steps, drafted=drafted, alike=False, prompts=prompts)
