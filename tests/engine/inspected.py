"""A worker extension that also says what it serves, and what a refresh must bring."""

from __future__ import annotations

from typing import Any

from draft_training import fingerprint
from spec_plugin.engine.vllm.capabilities import find_draft
from spec_plugin.engine.vllm.extension import SpecWorkerExtension
from spec_plugin.engine.vllm.repairs import patches

EXTENSION = "inspected.Inspected"


class Inspected(SpecWorkerExtension):
    """The plugin's own, looked into."""

    def spec_lost_draft(self) -> bool:
        """Are the draft's weights no longer those that were installed, or first seen."""
        self.spec_look_at_draft()
        return fingerprint(self._spec_layout().parameters) != self._spec_state.served.fingerprint

    def spec_draft_info(self) -> dict[str, Any]:
        """What this worker serves; also has it remember the draft as it is, if nothing was installed yet.

        Returns:
            ``has_draft``, ``draft_class``, ``runner``; ``expected``: checkpoint name -> (shape, dtype) that a refresh must bring;
            ``optional`` names; ``shared``: name -> the target's parameter in its place, never to be sent; ``problem``: why this
            draft cannot be refreshed, or None; ``draft_version``, ``digest``; ``patches``.
        """
        draft, layout = find_draft(self), self._spec_layout()
        self.spec_look_at_draft()
        served = self._spec_state.served
        return {
            "has_draft": draft is not None,
            "draft_class": type(draft).__name__ if draft is not None else None,
            "runner": f"{type(self.model_runner).__module__}.{type(self.model_runner).__name__}",
            "patches": [vars(status).copy() for status in patches.statuses.values()],
            "draft_version": served.version,
            "digest": served.digest,
            "expected": {n: (s.shape, str(s.dtype).removeprefix("torch.")) for n, s in layout.slots.items()},
            "optional": sorted(layout.optional),
            "shared": dict(layout.shared),
            "problem": layout.problem,
        }
