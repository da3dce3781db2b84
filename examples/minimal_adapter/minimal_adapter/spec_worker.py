"""The adapter's part inside vLLM's worker: the loop's extension with spec-plugin's beside it."""

from __future__ import annotations

from typing import Any

from safetensors.torch import load

from minimal_adapter.worker import PolicyWorker
from spec_plugin.engine.extension import SpecWorkerExtension


class SpecWorker(SpecWorkerExtension, PolicyWorker):
    """Takes drafts as the loop sends them; names start with ``spec_``, so that they cannot collide with vLLM's."""

    def spec_install_tensors(
        self, version: int, digest: str, force: bool, weights: bytes, hold: bool = False
    ) -> dict[str, Any]:
        """Stage what arrived, and swap it in, all or nothing; ``digest`` is the sender's."""
        tensors = load(weights)
        self.spec_stage(version, list(tensors.items()))
        return self.spec_install(version, digest, names=list(tensors), force=force, hold=hold)
