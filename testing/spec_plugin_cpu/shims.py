"""Replaces a trainer's functions on a machine without an accelerator, each only while it still looks as it did."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from spec_plugin.api.errors import PatchError


class Shims:
    """The replacements of one package, each made once."""

    def __init__(self, package: str, advice: str) -> None:
        """Replace nothing yet.

        Args:
            package: whose shims these are, for messages.
            advice: ends the message where a replacement does not fit.
        """
        self._package, self._advice, self._mark = package, advice, f"_{package.replace('.', '_')}"

    def replace(
        self,
        module: str,
        path: str,
        replacement: Callable[[Any], Any],
        parameters: Sequence[str] = (),
        landmarks: Sequence[str] = (),
    ) -> None:
        """Put ``replacement(original)`` in place of a function, once.

        Args:
            module: where it is defined; imported here.
            path: its attribute path in the module.
            replacement: takes the original, returns the new function.
            parameters: names with which the original's parameters must begin.
            landmarks: pieces of text that the original's source must contain.

        Raises:
            PatchError: if the function is gone, or is no longer what the replacement was written for.
        """
        *parents, name = path.split(".")
        try:
            owner: Any = importlib.import_module(module)
            for parent in parents:
                owner = getattr(owner, parent)
            original = getattr(owner, name)
        except (ImportError, AttributeError) as error:
            raise PatchError(f"{self._package}: {module}:{path} is gone ({error}); {self._advice}") from error
        if hasattr(original, self._mark):
            return
        if parameters:
            found = tuple(inspect.signature(original).parameters)
            if found[: len(parameters)] != tuple(parameters):
                raise PatchError(
                    f"{self._package}: {module}:{path} takes {found}, not {tuple(parameters)}…; {self._advice}"
                )
        if landmarks:
            source = inspect.getsource(original)
            if missing := [mark for mark in landmarks if mark not in source]:
                raise PatchError(f"{self._package}: {module}:{path} no longer contains {missing}; {self._advice}")
        new = replacement(original)
        setattr(new, self._mark, True)
        setattr(owner, name, new)
