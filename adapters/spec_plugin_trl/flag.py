"""The options of a run: of the launcher, of ``enable``, and of the environment variable ``SPEC_PLUGIN_TRL``.

Its words ``name=value`` set options, ``"k=5 block=metrics,pace"``; ``0`` turns a run off that has the launcher or ``enable``. By
itself it turns nothing on: Python does not look at it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spec_plugin.adapter import SpecConfig

FLAG = "SPEC_PLUGIN_TRL"
LEAVE_OUT = f"set {FLAG}=0"
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


def joined(given: Sequence[str], ours: Mapping[str, Any]) -> str:
    """A value of the variable: words that were in it, and options of a command line behind them."""
    return shlex.join([*given, *(f"{name}={_word(value)}" for name, value in ours.items())])


def turned_off() -> bool:
    """Does the variable say that a run with the launcher, or ``enable``, is to be a plain one."""
    first = os.environ.get(FLAG, "").split()[:1]
    return bool(first) and first[0].lower() in _OFF


def choose(arguments: Any = None, given: Mapping[str, Any] | None = None) -> bool:
    """Take options of a script; the variable has them all from then on, for this process and those that it starts.

    Args:
        arguments: of ``SpecArguments``; None: there are none.
        given: options by name.

    Returns:
        Is the run one with drafts.

    Raises:
        SpecConfigError: naming an option that does not exist, or whose value is out of bounds.
    """
    from spec_plugin.adapter import SpecConfigError, is_on

    on = is_on(switch := getattr(arguments, "spec", True))
    if on is None:
        raise SpecConfigError(f"spec={switch!r}: expected on or off")
    if turned_off() or not on:
        return False
    said = {} if arguments is None else vars(arguments)
    ours = {n.removeprefix("spec_"): value for n, value in said.items() if n != "spec" and value is not None}
    os.environ[FLAG] = joined(["1", *words()], {**ours, **(given or {})})
    options()
    return True


def _word(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return "none" if value is None else str(value)


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
