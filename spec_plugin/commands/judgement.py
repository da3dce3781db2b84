"""What is said of a run before it starts: objections, and what it would do; the run's own refusals are the same objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draft_training import files
from draft_training.errors import CheckpointError, DraftConfigError
from draft_training.outside import ModelBasics, read
from spec_plugin.errors import SpecConfigError

OURS = "spec-plugin"


@dataclass(frozen=True)
class Objection:
    """One option that stands in the way of a run."""

    option: str  # as the user writes it; empty where ``why`` names it
    value: str
    reason: str  # a few words that stay the same from run to run, for counting
    why: str  # one sentence without a full stop
    instead: str  # what to do
    by: str = OURS  # who refuses: us, or the trainer itself

    def __str__(self) -> str:
        between = " " if self.option.startswith("-") else "="
        where = f" ({self.option}{between}{self.value})" if self.option else ""
        return f"{self.why}{where}: {self.instead}"


def unsupported(option: str, value: Any, what: str, instead: str) -> Objection:
    """Something that this version has not been shown to do.

    Args:
        option: as the user writes it.
        value: that it has.
        what: a noun phrase.
        instead: an imperative, such as ``set it to 1``.
    """
    return Objection(option, str(value), what, f"spec-plugin does not support {what} yet", instead)


def refuse(objections: Iterable[Objection], leave_out: str) -> None:
    """Stop a run for all of its objections at once.

    Args:
        objections: what ``spec-plugin check`` reports too.
        leave_out: how the user runs without spec-plugin, ``leave out --spec.enable``.

    Raises:
        SpecConfigError: with one line for each objection.
    """
    if lines := [str(objection) for objection in objections]:
        raise SpecConfigError("\n".join([*lines[:-1], f"{lines[-1]}, or {leave_out}"]))


@dataclass(frozen=True)
class Model:
    """What could be found out about the policy's model."""

    name: str
    config: Mapping[str, Any] | None  # config.json; None: it could not be looked at
    source: str  # where it was found, or why not


FindModel = Callable[[str], Model]


def find_model(name: str) -> Model:
    """Look for a model's config.json in a folder and in the hub's local cache; nothing is ever downloaded.

    Raises:
        SpecConfigError: if there is one and it cannot be read.
    """
    file = Path(name) / "config.json"
    try:
        here = file.exists()
    except OSError as error:  # a name that no folder can have, or one that may not be looked into
        return Model(name, None, str(error))
    if not here:
        cached = _in_hub_cache(name)
        if cached is None:
            return Model(name, None, "it is neither a folder with a config.json here nor in the hub's local cache")
        file = Path(cached)
    return Model(name, read_json(file), str(file))


def read_json(file: Path) -> dict[str, Any]:
    """A model's config.json; what every method reads of it is of the kind that it must be.

    Raises:
        SpecConfigError: if it cannot be read, or says what cannot be, with the field, its value and the file.
    """
    try:
        config = files.read_json(file)
        read(ModelBasics, config, str(file))
    except (CheckpointError, DraftConfigError) as error:
        raise SpecConfigError(str(error)) from error
    return config


def _in_hub_cache(name: str) -> str | None:
    if Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or ":" in name:
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not a name that the hub could have
        return None
    return found if isinstance(found, str) else None


def load_hf_config(name: str, option: str) -> dict[str, Any]:
    """config.json of a run's model, from its folder or, as transformers itself would, from the hub.

    Args:
        name: folder, or name on the hub.
        option: where the user gave it, for the message.

    Raises:
        SpecConfigError: if it cannot be read.
    """
    file = Path(name) / "config.json"
    try:
        if not file.exists():
            from transformers.utils import cached_file

            file = Path(str(cached_file(name, "config.json")))
        return read_json(file)
    except (OSError, ValueError, SpecConfigError) as error:
        raise SpecConfigError(f"{option}: the config.json of {name} cannot be read: {error}") from error


@dataclass(frozen=True)
class Judgement:
    """Would this run be accepted, and what would it do?"""

    trainer: str
    objections: tuple[Objection, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)  # what it would do, by subject
    notes: tuple[str, ...] = ()  # worth knowing, stops nothing
    unseen: tuple[str, ...] = ()  # what could not be looked at, and why
    shapes: tuple[str, ...] = ()  # deployment shapes that it uses, as the conformance kit names them

    @property
    def accepted(self) -> bool:
        """True when nothing stands in the way, as far as could be seen."""
        return not self.objections


def split_launch(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """A command line as it is typed, ``ray job submit … -- python -m module arguments``, or the arguments alone.

    Returns:
        The module after ``-m``, None where there is none, and the trainer's own arguments.
    """
    given = list(arguments)
    if "-m" in given[:-1]:
        at = given.index("-m")
        return given[at + 1], given[at + 2 :]
    return None, given
