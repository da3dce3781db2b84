"""What the pieces of the adapter share inside one actor process: verl builds the engine and the rollout side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_plugin.actor.control import run_blocking

if TYPE_CHECKING:
    from spec_plugin.actor.control import RolloutControl
    from spec_plugin_verl.actor import SpecActor
    from spec_plugin_verl.standalone import Standalone


@dataclass
class ActorRuntime:
    """State of one actor process; filled by the engine first and the rollout adapter second."""

    engine: SpecActor | None = None
    control: RolloutControl | None = None
    standalone: Standalone | None = None  # where the engines live in processes of their own
    checked_version: int = -1  # version whose log-probs the log-prob pass has checked

    @property
    def policy_version(self) -> int:
        """Version of the weights that the engine rolls out with."""
        return self.control.policy_version if self.control is not None else -1

    def finish(self) -> None:
        """Before the trainer's first pass over what was generated: collect what the engines did.

        Raises:
            LosslessError: if an engine, in a process of its own, was found not to sample from the target.
        """
        assert self.control is not None
        if self.standalone is not None:
            self.standalone.wait()
        run_blocking(self.control.finish())


RUNTIME = ActorRuntime()
