"""Our part of vLLM's ``additional_config``: what the engine's processes must know beyond vLLM's own settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spec_plugin.api.errors import SpecConfigError

#: name -> what it is for
KNOWN = {
    "skip_patches": "names of repairs to leave out",
    "variable_length": "the method may propose fewer than k tokens, or none",
    "prompt_trees": "tokens that the trees of prompts keep, in the place of suffix decoding's own cache",
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


def with_own_settings(given: Mapping[str, Any], **ours: Any) -> dict[str, Any]:
    """The engine argument ``additional_config`` with these added to what the trainer gives."""
    theirs = dict(given.get("additional_config") or {})
    return {"additional_config": {**theirs, "spec_plugin": {**theirs.get("spec_plugin", {}), **ours}}}
