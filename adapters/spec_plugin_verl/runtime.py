"""What the pieces of the adapter share inside one actor process: verl builds the engine and the rollout side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from spec_plugin.actor.control import RolloutControl, run_blocking
from spec_plugin.spans import Spans


class Attachable(Protocol):
    """The actor, as ``SpecActor`` has it."""

    def attach(self, control: RolloutControl) -> None:
        """Start harvesting for this control's session."""

    def spec_dtype(self) -> str:
        """Dtype of the forward pass, as torch names it."""


class WeightTap(Protocol):
    """What begins a phase where the engines live in processes of their own, as ``Standalone`` does."""

    def tap(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass the weight stream on; behind its end the next phase begins."""

    def wait(self) -> None:
        """Before anything that needs the state of the phase."""


@dataclass
class Judged:
    """What the guards have seen of a step; it ends with its last mini-batch."""

    in_pass: bool = False  # all of it, in the trainer's own log-prob pass
    sample: bool = False  # the few sequences that are recomputed where there is no such pass
    spans: Spans | None = None  # what the engines have said, once they were asked


@dataclass
class ActorRuntime:
    """State of one actor process; filled by the engine first and the rollout adapter second."""

    engine: Attachable | None = None
    control: RolloutControl | None = None
    standalone: WeightTap | None = None  # where the engines live in processes of their own
    judged: Judged = field(default_factory=Judged)  # of the step in progress
    _trained: tuple[int, int] = (-1, 0)  # policy version, and the steps that were trained since its weight sync

    @property
    def policy_version(self) -> int:
        """Version of the weights that the engine rolls out with."""
        return self.control.policy_version if self.control is not None else -1

    @property
    def ahead(self) -> int:
        """Steps that were trained since the last weight sync: the actor's weights are newer than the engine's by those."""
        version, steps = self._trained
        return steps if version == self.policy_version else 0

    def step_ended(self) -> None:
        """The last mini-batch of a step was trained."""
        self._trained = self.policy_version, self.ahead + 1
        self.judged = Judged()

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
