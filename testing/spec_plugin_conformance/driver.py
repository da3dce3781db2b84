"""What an adapter provides so that the conformance kit can test it: how to run its trainer, and where the results lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

#: entry point group: adapter name -> ``module:Class`` of a ``ConformanceDriver``
DRIVER_GROUP = "spec_plugin_conformance"


@dataclass(frozen=True)
class RunSettings:
    """One run of the trainer on a tiny policy, on a CPU."""

    out: Path  # folder of this run alone: logs, checkpoints
    steps: int  # trainer steps, each with one rollout phase, one policy update and one weight sync
    enabled: bool = True  # is the adapter's documented flag set
    options: Mapping[str, Any] = field(default_factory=dict)  # SpecConfig options by name, set as the user would
    replay: Path | None = None  # record the rollouts there, or, when the folder holds some, train on those
    save_every: int = 0  # steps between two checkpoints, 0: none
    resume_from: RunSettings | None = None  # a former run: go on from its last checkpoint, up to ``steps``


def option_word(value: Any) -> str:
    """An option's value as a trainer's command line takes it: a list by commas, None as ``none``."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return "none" if value is None else str(value)


class RunFailed(RuntimeError):
    """The trainer stopped before its last step; the text holds the lines of its output that say why."""


class ConformanceDriver(ABC):
    """Runs one trainer for the kit. Everything that is written lies under ``root``."""

    #: prefix that the trainer's log puts before ``spec/…`` metrics
    metric_prefix = ""
    #: may sequences be older than the policy that recomputes them; ``policy_versions_agree`` then judges spans and lags
    asynchronous = False
    #: check name -> one sentence why this adapter cannot do that; reported as "refused"
    refused: Mapping[str, str] = {}
    #: shape (None: without one) -> check name -> one sentence whose fault it is that it fails there, though it is run; reported
    #: as "known", and as "failed" once it passes: then the sentence is to go
    known_in: ClassVar[Mapping[str | None, Mapping[str, str]]] = {}
    #: name of a deployment shape -> what it is; the checks are the same in each
    shapes: ClassVar[Mapping[str, str]] = {}
    #: can the policy be of any family in ``spec_plugin_conformance.targets``; ``__init__`` then takes ``family``
    takes_families: ClassVar[bool] = False
    #: where an engine keeps the policy version that it stamps on what it samples, as ``module:Class.attribute``; the kit has it
    #: say one less for a moment. Not needed where ``asynchronous``
    engine_version = ""
    #: options of vLLM's ``SamplingParams`` that the trainer's own configuration asks of each rollout request, where they are not
    #: vLLM's defaults: ``max_tokens``, ``temperature``, stops, … A pair is the least and the most, for what differs by request
    requests: Mapping[str, Any] = {}
    #: the same of validation rollouts, as far as they differ from the others: by these they are told from what is trained on
    validation: Mapping[str, Any] = {}
    #: what a run of the trainer without the flag must not import
    adapter_modules: tuple[str, ...] = ()
    #: modules that such a run imports first
    trainer_modules: tuple[str, ...] = ()

    def __init__(self, root: Path, shape: str | None = None, family: str | None = None) -> None:
        """Make the tiny policy and the data, in seconds, without a network.

        Args:
            root: everything that is written lies there.
            shape: one of ``shapes``; None: the plainest. A driver that knows no shapes need not take it.
            family: of the policy; None: the driver's choice. Given only where ``takes_families``.
        """
        self.root, self.shape, self.family = root, shape, family

    @property
    @abstractmethod
    def target(self) -> Path:
        """Folder of the policy's Hugging Face checkpoint at version 0."""

    @abstractmethod
    def launch(self, run: RunSettings) -> Generator[tuple[int, dict[str, float]], None, None]:
        """Start the real trainer and yield (step, metrics) as each step completes; closing it kills the trainer.

        Raises:
            RunFailed: if the trainer exits before the last step.
        """

    @abstractmethod
    def policy(self, run: RunSettings, step: int) -> dict[str, Tensor]:
        """The policy's parameters in the checkpoint after ``step``."""

    def weights(self, run: RunSettings, step: int) -> Mapping[str, Tensor] | None:
        """The same as the engine is to have them, matrix by matrix; None: the checkpoint has them in parts or other shapes."""
        return self.policy(run, step)

    def dropped(self, run: RunSettings) -> Sequence[Sequence[int]]:
        """Token ids, prompt and response, of what the trainer's own log says that it dropped before its loss, on purpose."""
        return []

    def random_state(self, run: RunSettings, step: int) -> Mapping[str, str] | None:
        """Digests of the random streams that the trainer saves in that checkpoint, by name; None: it saves none."""
        return None
