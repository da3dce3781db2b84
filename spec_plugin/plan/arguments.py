"""``--spec.*`` on a trainer's command line, for trainers that have no place of their own for a plugin's options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spec_plugin.api.config import SpecConfig, described_options
from spec_plugin.api.errors import SpecConfigError

ENABLE = "enable"
PREFIX = "--spec."
_LISTS = ("block", "plugins", "aux_layers")
_YES, _NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def split_arguments(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Separate ``--spec.name value``, ``--spec.name=value`` and the switch ``--spec.enable`` from the trainer's flags.

    The switch may say ``true``, ``false``, ``on`` or ``off`` behind it; ``--spec off`` is the switch as well, where it says so.

    Returns:
        The trainer's arguments, untouched and in order, and our raw options by name; lists are comma-separated.

    Raises:
        SpecConfigError: if an option has no value, or the switch another than true and false.
    """
    theirs: list[str] = []
    ours: dict[str, Any] = {}
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if (said := _switched([argument, *rest[:1]])) is not None:
            ours[ENABLE] = said
            rest = rest["=" not in argument :]
            continue
        if not argument.startswith(PREFIX):
            theirs.append(argument)
            continue
        name, has_value, value = argument.removeprefix(PREFIX).partition("=")
        if name == ENABLE:
            if not has_value and rest and is_on(rest[0]) is not None:
                value, has_value = rest.pop(0), "="
            ours[ENABLE] = _switch(value) if has_value else True
            continue
        if not has_value:
            if not rest or rest[0].startswith("--"):
                raise SpecConfigError(f"{PREFIX}{name} needs a value; all options: spec-plugin options")
            value = rest.pop(0)
        ours[name] = [part for part in value.split(",") if part] if name in _LISTS and value != "none" else value
    return theirs, ours


def _switched(words: Sequence[str]) -> bool | None:
    """What ``--spec off`` or ``--spec=off`` says at the start of these words; None: it is another's argument."""
    word, has_value, value = words[0].partition("=")
    value = value if has_value else "".join(words[1:2])
    return is_on(value) if word == PREFIX.rstrip(".") else None


def is_on(value: object) -> bool | None:
    """Does a switch say on or off, as a word or a truth value; None: neither."""
    word = str(value).lower()
    return True if word in _YES else False if word in _NO else None


def _switch(value: str) -> bool:
    if (said := is_on(value)) is not None:
        return said
    raise SpecConfigError(f"{PREFIX}{ENABLE}={value!r}: expected true or false; leave the value out for true")


def read_config(raw: Mapping[str, Any]) -> SpecConfig:
    """SpecConfig from the raw options.

    Raises:
        SpecConfigError: naming the option as it stands on the command line.
    """
    return SpecConfig.parse({n: None if v == "none" else v for n, v in raw.items()}, PREFIX)


def help_text() -> str:
    """All ``--spec.*`` options with range, default and description, to be printed behind the trainer's ``--help``."""
    lines = [
        "",
        "speculative rollouts (spec-plugin):",
        f"  {PREFIX}{ENABLE}",
        "        the one flag: speculate, losslessly",
    ]
    for name, default, allowed, meaning in described_options():
        lines += [f"  {PREFIX}{name} ({allowed}; default {default})", f"        {meaning}"]
    return "\n".join([*lines, f"  Lists are comma-separated: {PREFIX}block name,name"])
