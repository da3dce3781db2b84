"""``--spec.*`` on a trainer's command line, for trainers that have no place of their own for a plugin's options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spec_plugin.config import SpecConfig, describe_range
from spec_plugin.errors import SpecConfigError

ENABLE = "enable"
PREFIX = "--spec."
_LISTS = ("block", "plugins", "aux_layers")


def split_arguments(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Separate ``--spec.name value``, ``--spec.name=value`` and the switch ``--spec.enable`` from the trainer's flags.

    Returns:
        The trainer's arguments, untouched and in order, and our raw options by name; lists are comma-separated.

    Raises:
        SpecConfigError: if an option has no value.
    """
    theirs: list[str] = []
    ours: dict[str, Any] = {}
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith(PREFIX):
            theirs.append(argument)
            continue
        name, has_value, value = argument.removeprefix(PREFIX).partition("=")
        if name == ENABLE:
            ours[ENABLE] = True
            continue
        if not has_value:
            if not rest or rest[0].startswith("--"):
                raise SpecConfigError(f"{PREFIX}{name} needs a value; all options: spec-plugin options")
            value = rest.pop(0)
        ours[name] = [part for part in value.split(",") if part] if name in _LISTS else value
    return theirs, ours


def read_config(raw: Mapping[str, Any]) -> SpecConfig:
    """SpecConfig from the raw options.

    Raises:
        SpecConfigError: naming the option as it stands on the command line.
    """
    return SpecConfig.parse({n: None if v == "none" else v for n, v in raw.items()}, PREFIX)


def help_text() -> str:
    """Our part of ``--help``."""
    lines = [
        "",
        "speculative rollouts (spec-plugin):",
        f"  {PREFIX}{ENABLE}",
        "        the one flag: speculate, losslessly",
    ]
    for name, field in SpecConfig.model_fields.items():
        default = "none" if field.default is None else field.default
        lines += [f"  {PREFIX}{name} ({describe_range(name)}; default {default})", f"        {field.description}"]
    return "\n".join([*lines, f"  Lists are comma-separated: {PREFIX}block name,name"])
