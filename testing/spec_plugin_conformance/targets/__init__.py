"""Tiny targets of other families for the kit's runs: one module each, which nobody else names.

A module has one ``TARGET``, a ``TinyTarget``. What was shown with them stands in ``spec_plugin.commands.forecast``.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True)
class TinyTarget:
    """How a tiny policy of one family is made, and what runs it."""

    name: str  # ``model_type`` for transformers
    engine_class: str  # of vLLM, as its registry finds it
    dtype: str = "float32"  # in which vLLM's CPU build runs it
    attention: str = "sdpa"  # implementation that transformers has for it on a CPU
    environment: Mapping[str, str] = field(default_factory=dict)  # that vLLM's CPU build needs for it
    note: str = ""  # what was not shown, and why
    changes: Mapping[str, Any] = field(
        default_factory=dict
    )  # to the kit's settings; for a model of parts, of its text part
    more: Mapping[str, Any] = field(default_factory=dict)  # of a model of parts: what stands beside its text part
    #: special ones that trainers and transformers ask its tokenizer for; ids 2 and up. Of one that reads images: in place of an
    #: image, of a video, what begins an image, what ends it
    tokens: tuple[str, ...] = ()
    #: of a model that reads images: transformers' classes of its processor, and of those for images and videos in it
    processor: tuple[str, str, str] | None = None
    quiet: tuple[str, ...] = ()  # norms behind its parts, scaled down: else what they add drowns the embedding
    packages: tuple[str, ...] = ()  # that its engine or trainer imports, and the environments here do without
    self_test_seconds: int = (
        15  # that prove it where a run is to be short; more for what vLLM's CPU kernels are slow at
    )
    mixed: bool = True  # do trainers take prompts with and without images beside each other

    @property
    def missing(self) -> list[str]:
        """Those of ``packages`` that are not installed here."""
        return [name for name in self.packages if find_spec(name) is None]


@lru_cache
def tiny_targets() -> Mapping[str, TinyTarget]:
    """The ``TARGET`` of each module here, by ``model_type``."""
    modules = (import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__))
    return {target.name: target for module in modules if (target := module.TARGET)}
