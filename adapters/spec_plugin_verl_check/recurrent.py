"""Actors whose model keeps recurrent states: where verl's rows leave these right, and which backends a run has shown."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from spec_plugin.adapter import Objection, keeps_states, parsed, source_of, unsupported
from spec_plugin_verl_check.actors import ACTORS

_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
#: backends of actors with which a whole run was shown
_SHOWN = ("fsdp", "fsdp2")
#: of the actor's environment; transformers' own operators, which step in where it is missing, know no borders
_KERNELS = "fla"


def objections(hf: Mapping[str, Any], strategy: str, packed: bool, tried: bool) -> Iterator[Objection]:
    """What stands in the way of a target with recurrent states; nothing for any other.

    Args:
        hf: the target's config.json.
        strategy: verl's name of the actor's backend.
        packed: are documents laid one behind the other in a row (``use_remove_padding``).
        tried: does the run want what no run has shown (``spec.recurrent_states=try``).
    """
    if not keeps_states(hf):
        return
    if strategy not in _SHOWN:
        if strategy in ACTORS and not tried:  # others are refused anyhow
            instead = f"set it to {' or '.join(_SHOWN)}, or spec.recurrent_states=try, which no run has shown"
            yield unsupported(f"{_ACTOR}.strategy", strategy, f"recurrent states in {strategy} actors", instead)
        return
    family = str(hf.get("model_type"))
    if packed and not borders_are_told(family):
        why = (
            f"verl does not tell the recurrent layers of {family} where a document of a packed row begins: each goes on with the "
            "state of the one before it, with the flag or without, so the actor's log-probs are not the engine's"
        )
        yield Objection(
            f"{_MODEL}.use_remove_padding", "True", "packed rows through recurrent layers", why, "set it to False"
        )


def notes(hf: Mapping[str, Any], packed: bool) -> Iterator[str]:
    """What such a run needs of the actor's environment."""
    if packed and keeps_states(hf) and find_spec(_KERNELS) is None:
        yield (
            "packed rows of a target with recurrent states: flash-linear-attention must be installed where the actor runs (here "
            "it is not), or transformers' own operators take a packed row for one document, with the flag or without"
        )


@lru_cache
def borders_are_told(model_type: str) -> bool:
    """Does the installed verl hand the borders of packed documents to this model's layers: some forward of its own takes them."""
    file = f"models/transformers/{model_type.removesuffix('_moe')}.py"
    functions = (node for node in ast.walk(parsed(source_of("verl", file))) if isinstance(node, ast.FunctionDef))
    return any(
        f.name.endswith("gated_delta_net_forward") and "cu_seqlens" in {a.arg for a in f.args.args} for f in functions
    )
