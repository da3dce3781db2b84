"""find_decoder: the decoder layers and the final norm of a policy's language model, found by looking, not by its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

#: attributes under which wrappers keep what they wrap: FSDP, activation checkpointing, torch.compile, PEFT's saved modules
_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "original_module", "base_layer")


@dataclass(frozen=True)
class Decoder:
    """The stack that a draft's hidden states come from."""

    layers: nn.ModuleList  # in order; as the model calls them, wrappers and all
    norm: nn.Module  # after the last of them
    embed: nn.Module  # of the input tokens
    place: str  # in the model, for messages: "model.language_model"


def find_decoder(model: nn.Module) -> Decoder:
    """The decoder of a Hugging Face causal LM, also inside FSDP, PEFT and models that take images.

    It is the one module that holds, side by side, the embedding of as many tokens as the config.json says, as many layers as
    it says, and one norm.

    Args:
        model: with a ``config``; wrapped or not.

    Raises:
        ValueError: if there is none, or more than one; in one sentence.
    """
    config: Any = unwrapped(model).config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = [d for name, module in model.named_modules() if (d := _decoder(name, module, text)) is not None]
    places = {d.place: d for d in found}
    if len(places) != 1:
        what = f"{len(places)} of them ({', '.join(places)})" if places else "none"
        raise ValueError(
            f"{type(unwrapped(model)).__name__}: looked for one module with an embedding of {text.vocab_size} tokens, "
            f"{text.num_hidden_layers} decoder layers and one final norm, found {what}; use a method that needs no hidden "
            "states (suffix, ngram)"
        )
    return found[0]


def unwrapped(module: Any) -> Any:
    """What the wrappers around a module keep."""
    if hasattr(module, "get_base_model"):  # PEFT
        return unwrapped(module.get_base_model())
    inside = next((module._modules[name] for name in _WRAPPED if name in module._modules), None)
    return module if inside is None else unwrapped(inside)


def _decoder(name: str, module: nn.Module, text: Any) -> Decoder | None:
    if unwrapped(module) is not module:
        return None  # it will come by itself
    children = [(child, unwrapped(child)) for child in module.children()]
    embeds = [c for c, inner in children if isinstance(inner, nn.Embedding) and inner.num_embeddings >= text.vocab_size]
    stacks = [c for c, inner in children if isinstance(inner, nn.ModuleList) and len(inner) == text.num_hidden_layers]
    norms = [c for c, inner in children if "norm" in type(inner).__name__.lower()]
    if len(embeds) != 1 or len(stacks) != 1 or len(norms) != 1:
        return None
    place = ".".join(part for part in name.split(".") if part not in _WRAPPED)
    return Decoder(stacks[0], norms[0], embeds[0], place)
