"""What plugins answer to ``spec_metrics``, which may be anything, as the finite numbers that a trainer can log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import pluggy

from spec_plugin.api.answers import finite_float, type_and_value
from spec_plugin.api.speculation import Reason
from spec_plugin.lifecycle.manager import call_each

logger = logging.getLogger(__name__)
#: in a warning, in the place of a plugin's name: which one it was nobody can tell
_WRAPPER = "a wrapper of spec_metrics"


class Guarded(Protocol):
    """``SpecSession.guarded``."""

    def __call__(self, reason: Reason, doing: str = "", harmless: bool = False) -> AbstractContextManager[None]:
        """Hold draft trouble in the block."""


class PluginMetrics:
    """The metrics of one session's plugins. What is no finite number is left out, and one warning names it."""

    def __init__(self, manager: pluggy.PluginManager, guarded: Guarded) -> None:
        self._manager, self._guarded = manager, guarded
        self._left_out: set[tuple[str, object]] = set()  # that a warning has named

    def merged(self) -> dict[str, float]:
        """All plugins' metrics; one that fails, or answers something else, does not silence the others."""
        found = list[Mapping[str, float]]()

        def each(plugin: str, metrics: Callable[[], object]) -> dict[str, float]:
            numbers: dict[str, float] = {}
            with self._guarded(Reason.OTHER_TROUBLE, f"metrics of plugin {plugin}", harmless=True):
                numbers = self.finite(f"plugin {plugin}", metrics())
            found.append(dict(numbers))  # a wrapper may write into what it gets, and fail then
            return numbers

        answers: object = found
        with self._guarded(Reason.OTHER_TROUBLE, "metrics in a wrapper", harmless=True):
            answers = call_each(self._manager, "spec_metrics", each)
        if not isinstance(answers, list):
            self.leave_out(_WRAPPER, "all that it made of the metrics", answers, "no list of mappings")
            answers = found
        merged: dict[str, float] = {}
        for answer in answers:
            with self._guarded(Reason.OTHER_TROUBLE, "metrics in a wrapper's answer", harmless=True):
                merged |= self.finite(_WRAPPER, answer)
        return merged

    def finite(self, who: str, answer: object) -> dict[str, float]:
        """The part of somebody's answer that is finite numbers under names."""
        if not isinstance(answer, Mapping):
            if answer is not None:
                self.leave_out(who, "all metrics", answer, "no mapping of names to numbers")
            return {}
        numbers: dict[str, float] = {}
        for name, value in answer.items():
            number = finite_float(value)
            if number is None or not isinstance(name, str):
                self.leave_out(who, name, value, "no finite number under a name")
            else:
                numbers[name] = number
        return numbers

    def leave_out(self, who: str, name: object, value: object, wrong: str) -> None:
        """Warn, once, that somebody's metric is not logged, and what is wrong with its value."""
        if (who, name) not in self._left_out:
            self._left_out.add((who, name))
            logger.warning(
                "spec-plugin: %s, metric %s: %s is %s. It is left out of the log, and the run goes on; correct that plugin",
                *(who, name, type_and_value(value), wrong),
            )
