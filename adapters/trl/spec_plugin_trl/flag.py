"""The flag: the environment variable ``SPEC_PLUGIN_TRL``, which Python looks at when it starts (``spec_plugin_trl.pth``).

``1`` turns speculative rollouts on, ``0`` off; so do words ``name=value``, which set options: ``"k=5 block=metrics,pace"``.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spec_plugin.adapter import SpecConfig

FLAG = "SPEC_PLUGIN_TRL"
LEAVE_OUT = f"unset {FLAG}"
_ON, _OFF = ("1", "true", "on", "yes"), ("0", "false", "off", "no")


def words(said: str | None = None) -> list[str]:
    """The words of the variable that set options; nothing where it is off.

    Args:
        said: what stands in the variable's place.

    Raises:
        SpecConfigError: if a quotation has no end.
    """
    from spec_plugin.adapter import SpecConfigError

    text = os.environ.get(FLAG, "") if said is None else said
    try:
        given = shlex.split(text)
    except ValueError as error:
        raise SpecConfigError(f"{FLAG}={text}: {str(error).lower()}") from error
    return [] if given[:1] and given[0].lower() in _OFF else [word for word in given if word.lower() not in _ON]


def joined(given: Sequence[str], ours: Mapping[str, str | list[str]]) -> str:
    """A value of the variable: words that were in it, and options of a command line behind them."""
    more = (f"{name}={','.join(value) if isinstance(value, list) else value}" for name, value in ours.items())
    return shlex.join([*given, *more])


def wanted() -> bool:
    """Is the flag set."""
    given = os.environ.get(FLAG, "").split()
    return bool(given) and given[0].lower() not in _OFF


def options(said: str | None = None) -> SpecConfig:
    """The run's options.

    Args:
        said: what stands in the variable's place.

    Raises:
        SpecConfigError: naming the variable and the option.
    """
    from spec_plugin.adapter import PREFIX, SpecConfig, SpecConfigError, split_arguments

    given = words(said)
    if wrong := [word for word in given if "=" not in word]:
        raise SpecConfigError(
            f"{FLAG}: {wrong[0]!r} is neither 1 nor 0 nor name=value; `spec-plugin options` lists the names"
        )
    _, ours = split_arguments([PREFIX + word for word in given])
    return SpecConfig.parse({name: None if value == "none" else value for name, value in ours.items()}, f"{FLAG}: ")
