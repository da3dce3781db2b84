"""The adapter's part inside vLLM's worker: the loop's extension with spec-plugin's before it."""

from __future__ import annotations

from minimal_adapter.worker import PolicyWorker
from spec_plugin.adapter import SpecWorkerExtension


class SpecWorker(SpecWorkerExtension, PolicyWorker):
    """Takes policies from the loop, and drafts from ``EngineFront``."""
