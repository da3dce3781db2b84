"""Our part of vLLM's ``additional_config``: what the engine's processes must know beyond vLLM's own settings."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from spec_plugin.api.errors import SpecConfigError

#: name -> what it is for
KNOWN = {
    "skip_patches": "names of repairs to leave out",
    "variable_length": "the method may propose fewer than k tokens, or none",
    "proposer": "module:function that prepares vLLM's proposer in the worker, before the model runner is built",
    "proposer_options": "argument of that function",
}


def own_settings(vllm_config: Any) -> Mapping[str, Any]:
    """The mapping under ``spec_plugin``; empty where the trainer set none.

    Raises:
        SpecConfigError: for a name that is not in ``KNOWN``.
    """
    additional = vllm_config.additional_config
    options: Mapping[str, Any] = additional.get("spec_plugin", {}) if isinstance(additional, Mapping) else {}
    if unknown := sorted(set(options) - set(KNOWN)):
        raise SpecConfigError(
            f"additional_config.spec_plugin has unknown keys {unknown}: remove them; known: {sorted(KNOWN)}"
        )
    return options


def prepare_proposer(settings: Mapping[str, Any]) -> None:
    """Call the method's ``proposer`` function, in a worker that has no model runner yet.

    Raises:
        PatchError: if vLLM's proposer is no longer what the method expects.
    """
    if (path := settings.get("proposer")) is not None:
        module, _, name = path.partition(":")
        getattr(importlib.import_module(module), name)(settings["proposer_options"])


def with_own_settings(given: Mapping[str, Any], **ours: Any) -> dict[str, Any]:
    """The engine argument ``additional_config`` with these added to what the trainer gives."""
    theirs = dict(given.get("additional_config") or {})
    return {"additional_config": {**theirs, "spec_plugin": {**theirs.get("spec_plugin", {}), **ours}}}
