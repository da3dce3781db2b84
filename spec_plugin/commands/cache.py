"""The KV cache that a model needs for a token, and how much more a draft adds, counted from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draft_training.errors import DraftConfigError
from draft_training.outside import Layer, read, text_part
from spec_plugin.engine_class import keeps_states

#: of ``layer_types``: layers that keep keys and values of the whole text, and not of a window, nor a state
_WHOLE = ("full_attention", "attention")


@dataclass(frozen=True)
class KeptPerToken:
    """What a model's KV cache holds for one token of a long text."""

    layers: int  # that keep keys and values of the whole text
    of: int  # all layers of the model
    numbers: int  # that one such layer keeps for a token
    latent: bool  # one vector for all heads, in place of keys and values


def kept(hf: Mapping[str, Any]) -> KeptPerToken | None:
    """What a model keeps of each token, from its config.json; None where that does not say how many layers it has, or how wide.

    Args:
        hf: whole, or its part for texts.
    """
    text = text_part(hf)
    layers, types, every = (text.get(n) for n in ("num_hidden_layers", "layer_types", "full_attention_interval"))
    if not isinstance(layers, int):
        return None
    whole = layers
    if isinstance(types, list):
        whole = sum(kind in _WHOLE for kind in types)
    elif isinstance(every, int) and every > 0 and keeps_states(hf):
        whole = layers // every
    rank, turned = (n if isinstance(n := text.get(name), int) else 0 for name in ("kv_lora_rank", "qk_rope_head_dim"))
    try:
        _, heads, width = read(Layer, text, "config.json").heads
    except DraftConfigError:  # whoever loads the model says what is wrong
        return None
    numbers = rank + turned if rank else 2 * heads * width
    return KeptPerToken(whole or layers, layers, numbers, rank > 0)


def share(draft: Mapping[str, Any], target: Mapping[str, Any], own_layer: bool = False) -> str:
    """How much KV cache a draft adds, in words; empty where the target's config does not tell.

    Args:
        draft: its config.json.
        target: its config.json.
        own_layer: the draft is a layer that the target brings, and ``draft`` the target's config.json.
    """
    theirs, ours = kept(target), kept(draft)
    if theirs is None or ours is None:
        return ""
    count, numbers = (1, theirs.numbers) if own_layer else (ours.layers, ours.numbers)
    percent = 100 * count * numbers / (theirs.layers * theirs.numbers)
    named = "one layer" if count == 1 else f"{count} layers"
    kind = " of latent attention" if theirs.latent else ""
    some = " that keep the whole text" if theirs.layers < theirs.of else ""
    return f"{percent:.0f} % more KV cache ({named} beside {theirs.layers}{kind}{some})"
