"""What plugins and engines answer, parsed where it comes in: it may be anything, since others wrote it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")
_SHOWN = 60  # characters of a wrong value


def type_and_value(value: object) -> str:
    """A value in a message: short, whatever it is."""
    try:
        text = repr(value)
    except Exception as error:  # such as an int of more digits than Python prints
        text = f"({type(error).__name__} while printing it)"
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return f"{text} of type {type(value).__name__}"


def expect_instance(value: object, kind: type[T], who: str) -> T:
    """An answer of this kind.

    Args:
        value: the answer.
        kind: that it must have.
        who: gave it, for the message.

    Raises:
        TypeError: if it is something else.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{who} returned {type_and_value(value)}; expected one {kind.__name__}")
    return value


def expect_list(values: object, kind: type[T], who: str) -> list[T]:
    """An answer that is a sequence of this kind.

    Raises:
        TypeError: if it, or any of it, is something else.
    """
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise TypeError(f"{who} returned {type_and_value(values)}; expected a sequence of {kind.__name__}")
    return [expect_instance(value, kind, who) for value in values]


def is_cancelled() -> bool:
    """Is the work that this is part of being cancelled, and not only something that it waited for."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no coroutine: nobody can cancel it
        return False
    asked = getattr(task, "cancelling", None)  # since Python 3.11
    return task is not None and (asked is None or asked() > 0)


def finite_float(value: Any) -> float | None:
    """A finite float, if this is a number of any kind (a bool, NumPy's, a tensor of one); else None."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        found = float(value)
    except Exception:  # whatever its own conversion raises: it is no number
        return None
    return found if math.isfinite(found) else None
