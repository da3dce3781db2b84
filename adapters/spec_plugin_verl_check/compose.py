"""verl's configuration from the arguments of its main, composed by hydra as verl does it, without importing verl."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from spec_plugin.adapter import Objection, folder_of
from spec_plugin_verl_check.entries import MAIN, Entry

#: hydra's own flags that choose the configuration, with the long name that we use
#: hydra's other flags, and whether a value follows
_OF_HYDRA = {
    **dict.fromkeys(("--run", "-r", "--multirun", "-m", "--resolve"), False),
    **dict.fromkeys(("--cfg", "-c", "--package", "-p", "--info", "-i"), True),
}
_FLAGS = {
    "--config-path": "path",
    "-cp": "path",
    "--config-name": "name",
    "-cn": "name",
    "--config-dir": "dir",
    "-cd": "dir",
}


@dataclass(frozen=True)
class Composed:
    """The configuration, None where verl would not get one, and what verl itself would refuse."""

    config: Any
    objections: tuple[Objection, ...]


def verl_version() -> str:
    """Of the installed verl; empty where there is none."""
    try:
        return metadata.distribution("verl").version
    except metadata.PackageNotFoundError:
        return ""


def not_taken() -> str:
    """The reason of everything that verl refuses itself."""
    return f"arguments that verl {verl_version()} does not take"


def has_module(name: str) -> bool:
    """True when the installed verl has this module; found as a file, since importing takes half a minute."""
    folder, path = folder_of("verl"), Path(*name.split(".")[1:])
    return folder is not None and any((folder / p).is_file() for p in (f"{path}.py", path / "__main__.py"))


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
        return Composed(None, (_says("", "verl is not installed here", "run it where verl is installed"),))
    chosen, overrides = _split(arguments, found)
    config_dir = (folder / entry.folder / chosen.get("path", "config")).resolve()
    name = chosen.get("name", entry.name).removesuffix(".yaml")
    # one of verl's own configurations looks for the others beside the folder in which it is started
    search = [Path(chosen["dir"]).resolve()] if "dir" in chosen else []
    search += [folder / MAIN.folder / "config"] if entry is not MAIN else []
    if search:
        overrides.append(f"hydra.searchpath=[{','.join(f'file://{path}' for path in search)}]")
    if not config_dir.is_dir():
        return Composed(
            None, (*found, _says(f"--config-path={chosen['path']}", "there is no such folder", "leave it out"))
        )
    for _ in range(len(overrides) + 1):
        try:
            with warnings.catch_warnings(), initialize_config_dir(str(config_dir), version_base=None):
                warnings.simplefilter("ignore")  # a search path that is not there; hydra's error says what that means
                return Composed(compose(name, overrides), tuple(found))
        except (HydraException, OmegaConfBaseException, ValueError) as error:  # ValueError: hydra's, for odd groups
            at = _blamed(str(error), overrides)
            if at is None or overrides[at].startswith("++") or isinstance(error, MissingConfigException):
                found.append(_says(overrides[at] if at is not None else "", *_lines(error)))
                return Composed(None, tuple(found))
            found.append(_says(overrides[at], *_lines(error)))
            if overrides[at].startswith("~"):
                del overrides[at]
            else:
                overrides[at] = f"++{overrides[at].lstrip('+')}"
    return Composed(None, tuple(found))


def _split(arguments: Sequence[str], found: list[Objection]) -> tuple[dict[str, str], list[str]]:
    """Hydra's flags and the overrides; what is neither goes to ``found``."""
    chosen: dict[str, str] = {}
    overrides: list[str] = []
    rest, parser = list(arguments), OverridesParser.create()
    while rest:
        argument = rest.pop(0)
        flag, has_value, value = argument.partition("=")
        if flag in _OF_HYDRA:  # what to do with the configuration, not what is in it
            if _OF_HYDRA[flag] and not has_value and rest:
                rest.pop(0)
            continue
        if flag in _FLAGS:
            chosen[_FLAGS[flag]] = value if has_value or not rest else rest.pop(0)
            continue
        try:
            if not flag.lstrip("+~"):
                raise OverrideParseException(argument, "it has no key")
            parser.parse_override(argument)
        except (
            HydraException,
            ValueError,
            RecursionError,
        ) as error:  # of a number with thousands of digits; of lists in lists
            found.append(_says(argument, *_lines(error)))
            continue
        overrides.append(argument)
    return chosen, overrides


def _blamed(message: str, overrides: Sequence[str]) -> int | None:
    """Which override hydra complains of: it quotes the key, the whole, or the file that a choice would need."""
    message = message.partition("Config search path")[0]
    for at, override in enumerate(overrides):
        key = override.lstrip("+~").partition("=")[0]
        if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", message):
            return at
    complaint = message.partition("Available options")[0]
    for at, override in enumerate(overrides):
        key, _, value = override.partition("=")
        if "." not in key and value and value in complaint:
            return at
    return None


def _lines(error: Exception) -> tuple[str, str]:
    """Hydra's message in one line, and its advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    advice = [line for line in lines[1:] if line.startswith(("To append", "Either remove", "Or add"))]
    return lines[0] if lines else type(error).__name__, "; ".join(
        advice
    ) or "leave it out, or write it as this verl does"


def _says(override: str, message: str, instead: str) -> Objection:
    option, _, value = override.partition("=")
    why = f"verl {verl_version()} refuses this itself: {message.rstrip('.')}"
    return Objection(option or override, value, not_taken(), why, instead, "verl")
