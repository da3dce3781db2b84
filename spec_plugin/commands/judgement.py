"""Of ``spec-plugin check``: what it says of a run, and how it finds the run's model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from spec_plugin.api.errors import SpecConfigError
from spec_plugin.plan.refusals import Objection, read_json
from spec_plugin.plan.run_plan import FindModel, Model


@dataclass(frozen=True)
class Judgement:
    """Would this run be accepted, and what would it do?"""

    trainer: str
    objections: tuple[Objection, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)  # what it would do, by subject
    notes: tuple[str, ...] = ()  # of interest; they stop nothing
    unseen: tuple[str, ...] = ()  # what could not be checked, and why
    shapes: tuple[str, ...] = ()  # deployment shapes that it uses, as the conformance kit names them

    @property
    def accepted(self) -> bool:
        """True when nothing that was checked stops the run."""
        return not self.objections


def find_model(name: str) -> Model:
    """Look for a model's config.json in a folder and in the hub's local cache; nothing is ever downloaded."""
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
    try:
        return Model(name, read_json(file), str(file))
    except SpecConfigError as error:
        return Model(name, None, str(error), unreadable=True)


def model_from(file: Path) -> FindModel:
    """A finder that takes this config.json for whatever model is asked for.

    Raises:
        SpecConfigError: if it cannot be read.
    """
    config = read_json(file)
    return lambda name: Model(name, config, str(file))


def _in_hub_cache(name: str) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not a name that the hub could have, such as a path
        return None
    return found if isinstance(found, str) else None
