"""verl's configuration from the arguments of its main, composed by hydra as verl does it, without importing verl."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from spec_plugin.adapter import Objection, folder_of, version_of
from spec_plugin_verl_check.entries import MAIN, Entry

#: hydra's flags that choose the configuration; its others say what to do with it, and do not start a run
_CHOOSING = {
    **dict.fromkeys(("--config-path", "-cp"), "path"),
    **dict.fromkeys(("--config-name", "-cn"), "name"),
    **dict.fromkeys(("--config-dir", "-cd"), "dir"),
}


@dataclass(frozen=True)
class Composed:
    """A configuration, None where verl would not get one, and what verl itself would refuse."""

    config: Any
    objections: tuple[Objection, ...]


def refused_by_verl(option: str, value: str, why: str, instead: str = "") -> Objection:
    """An argument that verl itself stops at.

    Args:
        option: as the user writes it.
        value: that it has.
        why: verl's or hydra's own words.
        instead: an imperative; empty: a general one.
    """
    version = version_of("verl") or ""
    reason, why = f"arguments that verl {version} does not take", f"verl {version} refuses this itself: {why}"
    return Objection(option, value, reason, why, instead or f"write it as verl {version} does, or remove it", "verl")


def compose_config(arguments: Sequence[str], entry: Entry = MAIN) -> Composed:
    """Compose as ``python -m`` with this entry would.

    An override that this verl does not take is reported with hydra's message and then forced (``++``), so that the rest
    can be judged.

    Args:
        arguments: of its main, hydra's own flags included.
        entry: which of verl's trainers.
    """
    found: list[Objection] = []
    folder = folder_of("verl")
    if folder is None:
        why, instead = "verl is not installed here", "run the check where verl is installed"
        return Composed(None, (Objection("", "", why, why, instead, "verl"),))
    chosen, overrides = _split(arguments)
    config_dir = (folder / entry.folder / chosen.get("path", "config")).resolve()
    name = chosen.get("name", entry.name).removesuffix(".yaml")
    # one of verl's own configurations looks for the others beside the folder in which it is started
    search = [Path(chosen["dir"]).resolve()] if "dir" in chosen else []
    search += [folder / MAIN.folder / "config"] if entry is not MAIN else []
    if search:
        overrides.append(f"hydra.searchpath=[{','.join(f'file://{path}' for path in search)}]")
    while True:
        try:
            with warnings.catch_warnings(), initialize_config_dir(str(config_dir), version_base=None):
                warnings.simplefilter("ignore")  # a search path that is not there; hydra's error says what that means
                return Composed(compose(name, overrides), tuple(found))
        except (HydraException, OmegaConfBaseException, ValueError, RecursionError) as error:
            # ValueError: of odd groups, and of numbers with thousands of digits; RecursionError: of lists in lists
            lines = [line.strip().rstrip(".") for line in str(error).splitlines() if line.strip()]
            at = None if isinstance(error, MissingConfigException) else _blamed(lines[0], overrides)
            if at is None:
                found.append(refused_by_verl("", "", ". ".join(lines[:2])))
                return Composed(None, tuple(found))
            option, _, value = overrides[at].partition("=")
            found.append(refused_by_verl(option, value, lines[0]))
            if option.startswith(("++", "~")):  # forced already, or it would delete what is not there
                del overrides[at]
            else:
                overrides[at] = f"++{overrides[at].lstrip('+')}"


def _split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """What hydra's flags choose, and the overrides."""
    chosen: dict[str, str] = {}
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        flag, has_value, value = argument.partition("=")
        if flag in _CHOOSING:
            chosen[_CHOOSING[flag]] = value if has_value or not rest else rest.pop(0)
        else:
            overrides.append(argument)
    return chosen, overrides


def _blamed(message: str, overrides: Sequence[str]) -> int | None:
    """Which override hydra complains of: it quotes the key."""
    for at, override in enumerate(overrides):
        key = override.lstrip("+~").partition("=")[0]
        if key and re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", message):
            return at
    return None
