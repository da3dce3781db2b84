"""What the pieces of the adapter share inside one actor process: verl builds the engine and the rollout side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spec_plugin.actor.control import RolloutControl
    from spec_plugin_verl.actor import SpecFSDPEngine


@dataclass
class ActorRuntime:
    """State of one actor process; filled by the engine first and the rollout adapter second."""

    engine: SpecFSDPEngine | None = None
    control: RolloutControl | None = None
    checked_version: int = -1  # version whose log-probs the log-prob pass has checked

    @property
    def policy_version(self) -> int:
        """Version of the weights that the engine rolls out with."""
        return self.control.policy_version if self.control is not None else -1


RUNTIME = ActorRuntime()
