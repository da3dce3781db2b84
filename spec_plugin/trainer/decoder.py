"""The parts of a policy that a draft needs, found by looking: decoder layers, final norm, embedding, head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from draft_training.outside import text_part

#: attributes under which wrappers keep what they wrap: FSDP, activation checkpointing, torch.compile, PEFT's saved modules
_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "original_module", "base_layer")


#: last parts of the names that models give to the embedding of tokens and to the head
_EMBEDS = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "embedding")
_HEADS = ("lm_head", "embed_out", "output", "output_layer")


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
            f"{text.num_hidden_layers} decoder layers and one final norm, found {what}; set spec.method to one "
            "that reads no hidden states"
        )
    return found[0]


def load_policy(folder: Path, dtype: Any) -> Any:
    """A checkpoint as transformers loads it, for texts or for texts and images, in ``eval`` mode.

    Args:
        folder: with config.json and weights.
        dtype: torch's, of the weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText
    return kind.from_pretrained(folder, dtype=dtype).eval()


def text_sizes(hf: Mapping[str, Any]) -> tuple[int, int] | None:
    """Vocabulary and hidden size in a target's config.json; None where it does not say."""
    part = text_part(hf)
    sizes = part.get("vocab_size"), part.get("hidden_size")
    return (sizes[0], sizes[1]) if isinstance(sizes[0], int) and isinstance(sizes[1], int) else None


def shared_with_draft(name: str, shape: Sequence[int], sizes: tuple[int, int] | None) -> str | None:
    """Which of the two tensors that a draft shares with the policy this one is.

    Args:
        name: in a stream of weights, by whatever convention.
        shape: of the tensor.
        sizes: vocabulary and hidden size; None: nothing is known of them, and the name alone decides.

    Returns:
        "embed", "head" or None. Padding behind the vocabulary is allowed, as trainers add it.
    """
    *_, module, kind = ["", *name.split(".")]
    fits = sizes is None or (len(shape) == 2 and shape[0] >= sizes[0] and shape[1] == sizes[1])
    if kind != "weight" or not fits:
        return None
    if module in _HEADS:
        return "head"
    return "embed" if module in _EMBEDS else None


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
