"""What stands in the way of a run, and how it is refused: the same objections in the run and in ``spec-plugin check``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draft_training import files
from draft_training.errors import CheckpointError, DraftConfigError
from draft_training.outside import ModelBasics, read
from spec_plugin.api.errors import SpecConfigError
from spec_plugin.api.events import truncating

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


def wrong_option(error: SpecConfigError) -> Objection:
    """Of an option of ours that cannot be read; the error names it."""
    return Objection("", "", "a spec option", str(error), "`spec-plugin options` lists them")


def truncated_in_loss(sampling: Mapping[str, Any], rollout_in_loss: str) -> Iterator[Objection]:
    """Truncated sampling whose log-probs enter the loss: they cannot be verified.

    Args:
        sampling: options of the rollouts, by vLLM's names.
        rollout_in_loss: the option by which rollout log-probs enter the loss; empty: they do not.
    """
    if (cut := truncating(sampling)) and rollout_in_loss:
        yield Objection(
            ", ".join(cut),
            ", ".join(map(str, cut.values())),
            "truncated sampling whose log-probs enter the loss",
            "rollout log-probs enter the loss, and those of truncated sampling cannot be verified, so the run would stop at "
            "its first step",
            f"set top_p=1.0 and top_k=-1, or turn {rollout_in_loss} off",
        )


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


@contextmanager
def refusing(what: str = "") -> Iterator[None]:
    """What is wrong with a checkpoint, or with a config.json, is raised as a ``SpecConfigError``, behind these words."""
    try:
        yield
    except (CheckpointError, DraftConfigError, OSError) as error:
        raise SpecConfigError(f"{what}: {error}" if what else str(error)) from error


def read_json(file: Path) -> dict[str, Any]:
    """A model's config.json; what every method reads of it is of the kind that it must be.

    Raises:
        SpecConfigError: if it cannot be read, or says what cannot be, with the field, its value and the file.
    """
    with refusing():
        config = files.read_json(file)
        read(ModelBasics, config, str(file))
        return config


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
