"""Numbers of JSON that others wrote: a step's, and a metric's."""

from __future__ import annotations

import math
from collections.abc import Mapping

#: no run comes to this step; a number beyond it is a time, or no step at all
MOST_STEPS = 1_000_000
#: as which "not a number" and the infinities are written by loggers that keep to JSON, in small letters
_NO_NUMBERS = ("nan", "infinity", "-infinity", "inf", "-inf")


def step_number(value: object) -> int | None:
    """The number of a step; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST_STEPS:
        return None
    return int(value)


def numbers_of(record: Mapping[str, object], step: str = "") -> dict[str, float]:
    """The metrics among what is in a JSON object.

    Args:
        record: the object.
        step: the key of its step, which is none.
    """
    return {name: found for name, value in record.items() if name != step and (found := _number(value)) is not None}


def _number(value: object) -> float | None:
    """A metric, also where it is the word for what JSON has no number for; one that no float can hold is infinite."""
    if not isinstance(value, int | float):
        return float(value) if isinstance(value, str) and value.lower() in _NO_NUMBERS else None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
