"""The loop's own worker extension: lets the trainer load policy weights into vLLM's running worker."""

from __future__ import annotations

from typing import Any

from safetensors.torch import load

from minimal_adapter import cpu


class PolicyWorker:
    """Methods that vLLM adds to its worker."""

    model_runner: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> PolicyWorker:
        """Make weights replaceable on a CPU, before the model is loaded."""
        cpu.prepare_worker()
        return super().__new__(cls)

    def load_policy(self, version: int, weights: bytes) -> int:
        """Replace the policy's weights; returns the version that this worker now generates with."""
        model = self.model_runner.get_model()
        model.load_weights(iter(load(weights).items()))
        cpu.repack(model)
        return version
