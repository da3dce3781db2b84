"""Actors whose model keeps recurrent states: where verl's rows leave these right, and which backends a run has shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from spec_plugin.adapter import Objection, keeps_states, unsupported
from spec_plugin_verl_check.options import ACTORS

#: backends of actors with which a whole run was shown
_SHOWN = ("fsdp", "fsdp2")
#: families with a forward of verl's own (``verl/models/transformers``) that hands the layers the borders of packed documents
BORDERS_ARE_TOLD = ("qwen3_5", "qwen3_5_moe")
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
            what = f"recurrent states in {strategy} actors"
            yield unsupported("actor_rollout_ref.actor.strategy", strategy, what, instead)
        return
    family, option = str(hf.get("model_type")), "actor_rollout_ref.model.use_remove_padding"
    if packed and family not in BORDERS_ARE_TOLD:
        why = (
            f"verl does not tell the recurrent layers of {family} where a document of a packed row begins: each goes on with the "
            "state of the one before it, with the flag or without, so the actor's log-probs are not the engine's"
        )
        yield Objection(option, "True", "packed rows through recurrent layers", why, "set it to False")


def notes(hf: Mapping[str, Any], packed: bool) -> Iterator[str]:
    """What such a run needs of the actor's environment."""
    if packed and keeps_states(hf) and find_spec(_KERNELS) is None:
        yield (
            "packed rows of a target with recurrent states: flash-linear-attention must be installed where the actor runs (here "
            "it is not), or transformers' own operators take a packed row for one document, with the flag or without"
        )
