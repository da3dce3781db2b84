"""What an adapter reads of a run before it starts, as plain data: the ``RunPlan`` that its ``check`` answers with."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.plan.refusals import Objection

#: how an environment variable begins that stands before a command: ``NAME=``
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*=")
_SHOWN = 100  # characters of a command line in a message


@dataclass(frozen=True)
class Model:
    """What could be found out about the policy's model."""

    name: str
    config: Mapping[str, Any] | None  # config.json; None: it could not be looked at
    source: str  # where it was found, or why not
    unreadable: bool = False  # there is one, and the run could not read it either


#: looks for the model's config.json
FindModel = Callable[[str], Model]


@dataclass(frozen=True)
class RunFacts:
    """A run as its trainer would read it; sizes are 0 where its options do not tell."""

    spec: SpecConfig
    target: TargetInfo  # ``hf_config`` is empty where the model could not be looked at
    model: Model
    model_option: str  # where the user gives the model
    shape: str  # ranks, engines and how they are split, in words
    sleeps: bool = False  # the engine gives its memory back between rollouts
    rollout_in_loss: str = ""  # the option by which rollout log-probs enter the loss; empty: they do not
    bypass: bool = False  # the trainer skips its own log-prob pass


@dataclass(frozen=True)
class RunPlan:
    """What an adapter makes of a run's arguments."""

    trainer: str
    objections: tuple[Objection, ...] = ()  # the adapter's own, or the trainer's
    facts: RunFacts | None = None  # None: the arguments do not make a run
    notes: tuple[str, ...] = ()  # worth knowing, stops nothing
    unseen: tuple[str, ...] = ()  # what could not be looked at, and why


def split_launch(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """A command line as it is typed, ``ray job submit … -- python -m module arguments``, or the arguments alone.

    Returns:
        The module after ``-m``, None where there is none, and the trainer's own arguments.

    Raises:
        SpecConfigError: if it is neither, such as ``bash run.sh``.
    """
    given = list(arguments)
    if "-m" in given[:-1]:
        at = given.index("-m")
        return given[at + 1], given[at + 2 :]
    refuse_script(given)
    return None, given


def refuse_script(arguments: Sequence[str]) -> None:
    """Refuse a command line whose first word, behind variables, is a program: what that makes of the others is not known.

    Raises:
        SpecConfigError: with what to give instead.
    """
    program = next((word for word in arguments if not _VARIABLE.match(word)), "")
    if program and "=" not in program and not program.startswith(("-", "~")):
        raise SpecConfigError(
            f"{' '.join(arguments)[:_SHOWN]}: what this program starts is not read: write `echo` before the line of your script "
            "that starts the trainer, and give what that prints, or the trainer's arguments alone"
        )
