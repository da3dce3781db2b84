"""What the pieces of the adapter share inside one actor process: verl builds the engine and the rollout side by side."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spec_plugin.session import SpecSession

if TYPE_CHECKING:
    from spec_plugin_verl.actor import SpecFSDPEngine
    from spec_plugin_verl.rollout import SpecServerAdapter


@dataclass
class ActorRuntime:
    """State of one actor process; filled by the engine first and the rollout adapter second."""

    engine: SpecFSDPEngine | None = None
    adapter: SpecServerAdapter | None = None
    session: SpecSession | None = None
    policy_version: int = -1  # version of the weights that the engine rolls out with
    speculating: bool = False  # was any k > 0 in the current rollout phase
    checked_version: int = -1  # version whose log-probs the log-prob pass has checked
    slice_ended: float = field(default_factory=time.monotonic)


RUNTIME = ActorRuntime()
