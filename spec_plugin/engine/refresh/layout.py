"""Where each tensor of a draft checkpoint lives in vLLM's running draft, which fuses, renames, shares and shards them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

#: vLLM's fused linear layers and the checkpoint's layers that they stack along dimension 0, in order
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
SERVABLE = (torch.float32, torch.bfloat16, torch.float16)
#: checkpoint tensors that vLLM does not load; a refresh may carry them
IGNORED = frozenset({"t2d"})


@dataclass(frozen=True)
class Slot:
    """One tensor of the draft checkpoint and its place in the running draft."""

    name: str  # in the checkpoint
    parameter: str  # qualified name of vLLM's parameter
    shape: tuple[int, ...]  # of the whole tensor, before sharding
    dtype: torch.dtype  # in which vLLM serves it
    row: int = 0  # first row in the parameter
    rows: int = 0  # rows in the parameter
    shard_dim: int = 0  # dimension of the whole tensor that is sharded over tensor parallel ranks
    shard_start: int = 0  # this rank's first index along ``shard_dim``

    def live(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The view of the running parameter that holds this tensor (this rank's shard of it)."""
        return parameters[self.parameter].detach().narrow(0, self.row, self.rows)

    def shard(self, whole: Tensor, like: Tensor) -> Tensor:
        """This rank's shard of a whole tensor; ``like`` is the live view."""
        return whole.narrow(self.shard_dim, self.shard_start, like.shape[self.shard_dim])


@dataclass(frozen=True)
class Layout:
    """Everything that a refresh must know of the running draft."""

    slots: Mapping[str, Slot]  # checkpoint name -> place; only what the draft owns
    shared: Mapping[str, str]  # checkpoint name -> name of the target's parameter that the draft uses in its place
    optional: frozenset[str] = IGNORED
    one_layer: bool = False
    vocab_size: int = 0  # of the target, for the range of d2t
    problem: str | None = None  # why this draft cannot be refreshed at all
    parameters: Mapping[str, Tensor] = field(default_factory=dict, repr=False)  # the draft's own, by vLLM's names

    def canonical(self, name: str) -> str:
        """The spelling used here: vLLM reads both ``layers.0.`` and ``midlayer.`` for an EAGLE-3 draft's one layer."""
        return name.replace("layers.0.", "midlayer.") if self.one_layer else name

    def live_tensors(self) -> dict[str, Tensor]:
        """Views of the required running weights under their checkpoint names (shards, if tensor parallel)."""
        return {name: slot.live(self.parameters) for name, slot in self.slots.items() if name not in self.optional}


def draft_layout(draft: nn.Module, target: nn.Module) -> Layout:
    """Read the layout off the running models, so that no file and no convention has to be trusted."""
    theirs = {_storage(p): name for name, p in target.named_parameters() if p.numel()}
    # EAGLE loaders add "model." to what they read; vLLM's interface of targets declares the attribute, too, for any model
    eagle = "has_own_embed_tokens" in vars(draft) or "Eagle" in type(draft).__name__
    one_layer = eagle and hasattr(draft, "draft_id_to_target_id")
    spelt = partial(_checkpoint_name, one_layer=one_layer) if eagle else _unmapped(draft)
    config = getattr(draft, "config", None)
    slots: dict[str, Slot] = {}
    shared: dict[str, str] = {}
    own: dict[str, Tensor] = {}
    problem: str | None = None
    seen: set[int] = set()
    for path, module in draft.named_modules():
        if hasattr(module, "W_UK_T") or hasattr(module, "W_UV"):
            problem = f"{path} keeps weights derived from its parameters (multi-head latent attention)"
        for leaf, parameter in module.named_parameters(recurse=False):
            qualified = f"{path}.{leaf}" if path else leaf
            if parameter.numel() == 0:
                problem = (
                    f"{qualified} was packed at load and dropped; the patch live_weights of "
                    "spec-plugin-testing must be in force before the engine loads the model"
                )
                continue
            storage = _storage(parameter)
            if storage in theirs:
                shared[spelt(qualified)] = theirs[storage]
                continue
            if storage in seen:  # tied inside the draft: one name is enough
                continue
            seen.add(storage)
            if parameter.dtype not in (*SERVABLE, torch.int64) or leaf.endswith("_scale"):
                problem = f"{qualified} is {parameter.dtype}: a quantized draft cannot be refreshed"
            own[qualified] = parameter
            for slot in _slots(module, path, leaf, parameter):
                name = spelt(slot.name)
                slots[name] = Slot(**{**vars(slot), "name": name})
    vocab = int(getattr(config, "vocab_size", 0) or 0)
    pruned = int(getattr(config, "draft_vocab_size", 0) or vocab) != vocab
    optional = IGNORED if pruned else IGNORED | {"d2t"}
    if not slots and problem is None:
        problem = "the draft owns no parameter"
    return Layout(slots, shared, optional, one_layer, vocab, problem, own)


def _storage(parameter: Tensor) -> int:
    return parameter.untyped_storage().data_ptr()


def _unmapped(draft: nn.Module) -> Callable[[str], str]:
    """From running names to those of checkpoints, by the renaming that some drafts' own loaders apply."""
    mapper: Any = vars(draft).get("hf_to_vllm_mapper")
    if mapper is None:
        return str
    renamings = (getattr(mapper, f"orig_to_new_{of}") for of in ("prefix", "substr"))
    prefixes, parts = ({old: new for old, new in names.items() if new is not None} for names in renamings)
    # less the stacking of q, k, v: slots are told apart already
    forward = type(mapper)(orig_to_new_prefix=prefixes, orig_to_new_substr=parts)

    def name_of(running: str) -> str:
        name = next(
            (old + running.removeprefix(new) for old, new in prefixes.items() if running.startswith(new)), running
        )
        for old, new in parts.items():
            name = name.replace(new, old)
        return name if forward._map_name(name) == running else running

    return name_of


def _checkpoint_name(name: str, one_layer: bool) -> str:
    name = name.removeprefix("model.")
    if name == "draft_id_to_target_id":
        return "d2t"
    return name.replace("layers.0.", "midlayer.") if one_layer else name


def _slots(module: nn.Module, path: str, leaf: str, parameter: Tensor) -> Iterator[Slot]:
    """The checkpoint tensors inside one parameter. vLLM's layers are told apart by their attributes."""
    qualified = f"{path}.{leaf}" if path else leaf
    shape, dtype = tuple(parameter.shape), parameter.dtype
    *parents, layer = path.split(".")
    m: Any = module
    rank = int(getattr(m, "tp_rank", 0) or 0)
    if layer in FUSED:
        row = 0
        for part, (whole, rows, start) in zip(FUSED[layer], _fused_parts(m, shape[0], rank), strict=True):
            name = ".".join([*parents, part, leaf])
            yield Slot(name, qualified, (whole, *shape[1:]), dtype, row, rows, 0, start)
            row += rows
    elif hasattr(m, "org_vocab_size"):  # VocabParallelEmbedding, ParallelLMHead: rows padded, sharded by vocabulary
        first, last = m.shard_indices.org_vocab_start_index, m.shard_indices.org_vocab_end_index
        yield Slot(qualified, qualified, (m.org_vocab_size, *shape[1:]), dtype, 0, last - first, 0, first)
    elif leaf == "weight" and hasattr(m, "input_size_per_partition") and m.input_size != shape[1]:  # RowParallelLinear
        yield Slot(qualified, qualified, (shape[0], m.input_size), dtype, 0, shape[0], 1, rank * shape[1])
    elif hasattr(m, "output_size_per_partition") and m.output_size != shape[0]:  # ColumnParallelLinear
        yield Slot(qualified, qualified, (m.output_size, *shape[1:]), dtype, 0, shape[0], 0, rank * shape[0])
    else:
        yield Slot(qualified, qualified, shape, dtype, 0, shape[0])


def _fused_parts(m: Any, local: int, rank: int) -> list[tuple[int, int, int]]:
    """(whole rows, local rows, first whole row of this rank) of each part of a fused layer."""
    if hasattr(m, "total_num_kv_heads"):  # QKVParallelLinear; key and value heads may be replicated
        q, kv = m.num_heads * m.head_size, m.num_kv_heads * m.head_size
        kv_start = rank // m.num_kv_head_replicas * kv
        whole_kv = m.total_num_kv_heads * m.head_size
        return [(m.total_num_heads * m.head_size, q, rank * q), (whole_kv, kv, kv_start), (whole_kv, kv, kv_start)]
    total = sum(m.output_sizes)
    return [(size, size * local // total, rank * (size * local // total)) for size in m.output_sizes]
