"""A policy with the cost of a large model and the text of a small one: the small one, embedded exactly in the large shape.

Each weight of the small Qwen3 goes to a place in the large one such that the large one computes the same logits. The rest is
zero: it costs as much as any other number to multiply, and changes nothing. No training is needed, so that a benchmark on a
GPU begins within minutes, with text that a draft can learn.

Why the logits are the same, for a small hidden size h in a large H, small heads of d dimensions in large ones of D:

- Residual stream: the first h dimensions. RMSNorm divides by the root of the mean of H squares of which h are not zero, so
  its weights are scaled by sqrt(h / H). The same holds inside of a head, with d and D.
- Rotary embedding: dimension i turns with frequency theta^(-2i/d). Frequency 2i/d is frequency 2(iD/d)/D of the large head, so
  dimension i goes to iD/d, and its partner i + d/2 to iD/d + D/2.
- Attention divides by sqrt(D) where the small one divides by sqrt(d): the query's norm is scaled by sqrt(D / d).
- Further heads, MLP units and layers write through zeros. Each small key head gets its own large one, and query heads stand
  in the large group of their key head.
- Tokens that the small vocabulary does not have: one dimension of the residual stream is the same small number at every
  position, and their rows of the head have a large negative number there. A newborn draft has any number in that dimension, and
  would have to learn it before all else: where the small model has a dimension that is the same for every token, that is taken.

The small one's EAGLE-3 draft is embedded likewise, in the draft that the large shape would get: it reads the same layers, whose
inputs are the small ones', and uses the large embedding and head. It has no norm on its queries, so their projection is scaled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draft_training import DraftConfig, load_draft, save_draft
from examples.bench import workload
from examples.bench.common import CACHE, say
from examples.quickstart.policy import made_whole

_CONSTANT = 2.0**-10  # of the dimension that silences unknown tokens: its square vanishes in every norm
_SILENT = -50.0  # logit that it gives them, at least


@dataclass(frozen=True)
class Shape:
    """The large model's; the defaults are those of Qwen3-8B."""

    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151936


SHAPES = {
    "8b": Shape(),
    "1.7b": Shape(2048, 6144, 28, 16, 8, 128),  # Qwen3-1.7B, but that its head is of its own
    "small": Shape(512, 1024, 12, 8, 4, 64, 512),  # to see on a CPU that everything runs
}


def embedded_target(
    small: Path, shape: Shape, dtype: str, cache: Path | None = None, constant: int | None = None
) -> Path:
    """The small policy in the large shape, from the cache where it is.

    Args:
        small: folder of a Qwen3 that is not larger than ``shape`` in any way.
        shape: of the result.
        dtype: "bfloat16" or "float32".
        cache: folder of the results; none: that of all benchmarks.
        constant: a dimension of the small one's residual stream that is the same positive number for every token.
    """
    how = {**asdict(shape), "dtype": dtype, "how": 1} | ({} if constant is None else {"constant": constant})
    out = (cache or CACHE) / f"large-{workload.digest_of(small, how)}"
    if out.exists():
        return out
    say(f"embedding the policy in {shape.num_hidden_layers} layers of {shape.hidden_size}")
    config = AutoConfig.from_pretrained(small)
    source = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)
    state = source.state_dict()
    for name, value in asdict(shape).items():
        setattr(config, name, value)
    config.layer_types, config.max_window_layers = ["full_attention"] * shape.num_hidden_layers, shape.num_hidden_layers
    config.dtype = dtype
    large = empty_model(config, dtype)
    with torch.no_grad():
        Embedding(source.config, shape).fill(state, large, constant)
    with made_whole(out) as partial:
        large.save_pretrained(partial)
        AutoTokenizer.from_pretrained(small).save_pretrained(partial)
    return out


def embedded_draft(draft: Path, small: Path, target: Path, dtype: str, cache: Path | None = None) -> Path:
    """The small policy's draft, for the small policy in the large shape; from the cache where it is.

    Args:
        draft: folder of an EAGLE-3 draft of ``small``, of full vocabulary.
        small: folder of the small policy.
        target: folder that ``embedded_target`` made of it.
        dtype: of the draft.
        cache: folder of the results; none: that of all benchmarks.

    Raises:
        ValueError: naming what does not fit.
    """
    out = (cache or CACHE) / f"large-draft-{workload.digest_of(draft, {'for': target.name, 'dtype': dtype, 'how': 1})}"
    if out.exists():
        return out
    say("embedding the draft in the large shape")
    hf = AutoConfig.from_pretrained(target).to_dict()
    config, tensors = load_draft(draft, AutoConfig.from_pretrained(small).to_dict())
    if config.pruned or config.norm_before_residual:
        raise ValueError(
            f"the draft {draft} is of another kind: only one of full vocabulary, as we train it, is embedded"
        )
    shape = Shape(**{field.name: hf[field.name] for field in fields(Shape)})
    made = DraftConfig.from_target(hf, aux_layers=config.aux_layers)
    with made_whole(out) as partial:
        save_draft(partial, made, embedded_draft_tensors(tensors, config, shape, getattr(torch, dtype)))
    return out


def embedded_draft_tensors(
    small: Mapping[str, Tensor], config: DraftConfig, shape: Shape, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors of a small draft in a large one's, by checkpoint name.

    Args:
        small: of a draft with ``config``, unpruned.
        config: the small draft's.
        shape: of the large target.
        dtype: of the result.
    """
    h, H, m, M = config.hidden_size, shape.hidden_size, config.intermediate_size, shape.intermediate_size
    place = Embedding(_as_model(config), shape)
    aux, heads = len(config.aux_layers), shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    both = torch.cat([torch.arange(h), H + torch.arange(h)])  # of the embedding and of the hidden state
    states = torch.cat([i * H + torch.arange(h) for i in range(aux)])
    rows: dict[str, tuple[int, int, Any, Any, float]] = {  # [large, large], rows, columns, times
        "fc": (H, aux * H, slice(h), states, 1.0),
        "midlayer.self_attn.q_proj": (heads, 2 * H, place.queries, both, 1.0 / place.head_scale),
        "midlayer.self_attn.k_proj": (keys, 2 * H, place.keys, both, 1.0),
        "midlayer.self_attn.v_proj": (keys, 2 * H, place.keys, both, 1.0),
        "midlayer.self_attn.o_proj": (H, heads, slice(h), place.queries, 1.0),
        "midlayer.mlp.gate_proj": (M, H, slice(m), slice(h), 1.0),
        "midlayer.mlp.up_proj": (M, H, slice(m), slice(h), 1.0),
        "midlayer.mlp.down_proj": (H, M, slice(h), slice(m), 1.0),
    }
    out = {}
    for name, value in small.items():
        layer = name.removesuffix(".weight")
        if layer in rows:
            height, width, at, columns, scale = rows[layer]
            out[name] = torch.zeros(height, width, dtype=dtype)
            _put(out[name], at, columns, scale * value)
        else:  # norms
            out[name] = torch.ones(H, dtype=dtype)
            out[name][:h] = place.norm_scale * value
    out["fc.weight"][h, h] = 1.0  # the constant goes through, and silences the same tokens
    return out


def _as_model(config: DraftConfig) -> Any:
    return SimpleNamespace(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        tie_word_embeddings=False,
    )


def empty_model(config: Any, dtype: str) -> Any:
    """A model of that shape, all zero, without first drawing random weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model = model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.zero_()
    return model


class Embedding:
    """Where each number of the small model goes."""

    def __init__(self, small: Any, shape: Shape) -> None:
        """Check that it fits.

        Raises:
            ValueError: naming what does not.
        """
        self.small, self.shape = small, shape
        self.d = getattr(small, "head_dim", None) or small.hidden_size // small.num_attention_heads
        heads = small.num_attention_heads // small.num_key_value_heads
        group = shape.num_attention_heads // shape.num_key_value_heads
        limits = {
            "hidden size": small.hidden_size < shape.hidden_size,  # one more for the constant
            "MLP": small.intermediate_size <= shape.intermediate_size,
            "layers": small.num_hidden_layers <= shape.num_hidden_layers,
            "key heads": small.num_key_value_heads <= shape.num_key_value_heads,
            "query heads of a key head": heads <= group,
            "head dimension": shape.head_dim % self.d == 0,
            "vocabulary": small.vocab_size <= shape.vocab_size,
            "untied head": not small.tie_word_embeddings,
        }
        if wrong := [name for name, fits in limits.items() if not fits]:
            raise ValueError(f"the small model does not fit into {shape}: {', '.join(wrong)}")
        half, factor = self.d // 2, shape.head_dim // self.d
        low = torch.arange(half) * factor
        self.inside = torch.cat([low, low + shape.head_dim // 2])  # [d] places inside of a large head
        self.keys = self._heads(range(small.num_key_value_heads))
        self.queries = self._heads([kv * group + q for kv in range(small.num_key_value_heads) for q in range(heads)])
        # values are not rotated, but leave through the output projection: any places will do, if both agree
        self.norm_scale = math.sqrt(small.hidden_size / shape.hidden_size)
        self.head_scale = math.sqrt(self.d / shape.head_dim)

    def _heads(self, places: Any) -> Tensor:
        return torch.cat([place * self.shape.head_dim + self.inside for place in places])

    def fill(self, state: Mapping[str, Tensor], large: Any, constant: int | None = None) -> None:
        """Copy every weight to its place; see ``embedded_target``."""
        h, small = self.small.hidden_size, self.small
        target = dict(large.named_parameters())
        units, vocabulary = slice(small.intermediate_size), slice(small.vocab_size)
        for name, value in target.items():
            if name.endswith("norm.weight"):
                value.fill_(1.0)
        target["model.embed_tokens.weight"][vocabulary, :h] = state["model.embed_tokens.weight"].to(value.dtype)
        if constant is None:
            target["model.embed_tokens.weight"][:, h] = _CONSTANT
        else:
            target["model.embed_tokens.weight"][small.vocab_size :, constant] = state["model.embed_tokens.weight"][
                0, constant
            ]
        for i in range(small.num_hidden_layers):
            at = f"model.layers.{i}."
            for norm in ("input_layernorm", "post_attention_layernorm"):
                target[f"{at}{norm}.weight"][:h] = self.norm_scale * state[f"{at}{norm}.weight"]
            attention = f"{at}self_attn."
            for letter, rows in (("q", self.queries), ("k", self.keys), ("v", self.keys)):
                _put(
                    target[f"{attention}{letter}_proj.weight"],
                    rows,
                    slice(h),
                    state[f"{attention}{letter}_proj.weight"],
                )
            _put(target[f"{attention}o_proj.weight"], slice(h), self.queries, state[f"{attention}o_proj.weight"])
            # of the two, the queries' is left sqrt(D / d) larger
            for norm, scale in (("k_norm", self.head_scale), ("q_norm", 1.0)):
                scaled = scale * state[f"{attention}{norm}.weight"]
                target[f"{attention}{norm}.weight"][self.inside] = scaled.to(value.dtype)
            for letter in ("gate", "up"):
                _put(target[f"{at}mlp.{letter}_proj.weight"], units, slice(h), state[f"{at}mlp.{letter}_proj.weight"])
            _put(target[f"{at}mlp.down_proj.weight"], slice(h), units, state[f"{at}mlp.down_proj.weight"])
        target["model.norm.weight"][:h] = self.norm_scale * state["model.norm.weight"]
        _put(target["lm_head.weight"], vocabulary, slice(h), state["lm_head.weight"])
        self._silence(state, target, constant)

    def _silence(self, state: Mapping[str, Tensor], target: Mapping[str, Tensor], constant: int | None) -> None:
        """Give the tokens that the small model does not have a logit that is never sampled."""
        if constant is not None:
            embed = state["model.embed_tokens.weight"]
            normed = embed[:, constant] / embed.square().mean(-1).sqrt() * state["model.norm.weight"][constant]
            target["lm_head.weight"][self.small.vocab_size :, constant] = _SILENT / float(normed.min())
            return
        # the final norm divides by a root mean square that is of the order of the embedding's at least; 100 times to spare
        size = state["model.embed_tokens.weight"].norm(dim=-1).max() / math.sqrt(self.shape.hidden_size)
        target["model.norm.weight"][self.small.hidden_size] = 1.0
        target["lm_head.weight"][self.small.vocab_size :, self.small.hidden_size] = (
            100 * _SILENT * float(size) / _CONSTANT
        )


def _put(target: Tensor, rows: Any, columns: Any, value: Tensor) -> None:
    """``target[rows][:, columns] = value`` for any mixture of slices and index tensors."""
    rows = torch.arange(target.shape[0])[rows]
    columns = torch.arange(target.shape[1])[columns]
    target[rows[:, None], columns[None, :]] = value.to(target.dtype)
