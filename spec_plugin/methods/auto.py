"""The auto method: the choice among the others, at start, from the target and from what is installed.

An engine cannot change its method while it runs: vLLM builds the proposer, the KV cache of the draft and the kind of scheduling
(asynchronous or not) for one of them. So what is chosen here holds for the run, and its break-even decides step by step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.api.hookspecs import hookimpl
from spec_plugin.api.method import Method
from spec_plugin.methods.fit import refuse_unfit
from spec_plugin.methods.frozen import kind_of


class AutoMethod:
    """A layer that the target brought knows something at once; a draft that learns fits every dense target; a look-up any."""

    def __init__(self, methods: Mapping[str, Any]) -> None:
        """``methods``: by name, the very plugins that are registered: one that is chosen may have a memory."""
        self._methods = methods

    @hookimpl
    def spec_method(self, config: SpecConfig, target: TargetInfo) -> Method | None:
        """The first that can; ``Method.why`` says in one line why it, and why not those before it.

        Raises:
            SpecConfigError: if a draft was given that none takes.
        """
        if config.method != "auto":
            return None
        passed: list[str] = []
        for name, why in self._in_order(config):
            wanted = config.model_copy(update={"method": name})
            try:
                found: Method | None = self._methods[name].spec_method(wanted, target)
                if found is not None:
                    refuse_unfit(found, wanted, target)
            except SpecConfigError as error:
                if config.draft is not None:
                    raise
                passed.append(f"{name} cannot: {error}")
                continue
            if found is not None and (found.pretrained or (found.newborn and name != "mtp")):
                return replace(found, why="; ".join([why, *passed]))
            passed.append(f"{name} cannot: the target's layer knows nothing yet")
        raise SpecConfigError("spec.method='auto': no method can draft for this target: " + "; ".join(passed))

    def _in_order(self, config: SpecConfig) -> Iterator[tuple[str, str]]:
        if config.draft is not None:
            kind, _ = kind_of(Path(config.draft))
            own = kind in self._methods and config.train
            yield (kind if own else "frozen"), f"spec.draft is of the kind {kind}"
            return
        if config.train:
            yield "mtp", "the target brings a layer for it, which knows something at once"
            yield "eagle3", "a draft that learns along the run, born in it"
        yield "suffix", "nothing to train, and prompts come back"
        yield "ngram", "nothing to train"
