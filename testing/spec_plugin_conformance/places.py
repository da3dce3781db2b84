"""Where an engine holds each weight of a checkpoint: under its name, or beside its neighbours, in vLLM's order of packing.

Names differ in their beginning (``model.language_model.layers.3`` is ``language_model.model.layers.3``), matrices of one module
are packed by rows (queries, keys, values), those of experts in one tensor for all. Two weights of the same shape that were
exchanged have all their rows in the engine, but not there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

#: what vLLM packs into one matrix, in this order
PACKED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
Rows = Sequence[str]


def place(name: str) -> str:
    """A weight's name from its layer on; outside of layers its last two words."""
    found = re.search(r"(?:^|\.)(layers\.\d+\..*)$", name)
    return found[1] if found else ".".join(name.split(".")[-2:])


def missing(policy: Mapping[str, Rows], held: Mapping[str, Rows]) -> list[str]:
    """Names of the checkpoint's weights that the engine does not hold in their place.

    Args:
        policy: by name, ``draft_training.row_digests`` of each weight of a checkpoint.
        held: the same of the engine, by its own names.
    """
    at: dict[str, Rows] = {}
    for name, rows in held.items():
        at.setdefault(place(name), rows)
    named = {place(name) for name in policy}
    packed = {where: rows for where, rows in at.items() if where not in named}  # the others are a weight's own
    offsets = {name: _offset(place(name), rows, at, packed) for name, rows in policy.items()}
    return [name for name, offset in offsets.items() if offset is None] + _in_another_order(offsets)


def _in_another_order(offsets: Mapping[str, int | None]) -> list[str]:
    """Names of weights that one matrix holds, all of them, in another order than ``PACKED``; ``offsets`` as of ``_offset``."""
    found: list[str] = []
    for names in PACKED:
        for name in offsets:
            module, _, rest = name.rpartition(f".{names[0]}.")
            group = [other for n in names if (other := f"{module}.{n}.{rest}") in offsets] if rest else []
            begins = [offset for other in group if (offset := offsets[other]) is not None and offset >= 0]
            if len(begins) == len(group) and sorted(begins) != begins:
                found += group
    return found


def _offset(where: str, rows: Rows, at: Mapping[str, Rows], packed: Mapping[str, Rows]) -> int | None:
    """Of a weight's first row in the tensor that holds it; -1 where its rows are there in another order; None: they are not."""
    if where in at:  # behind the vocabulary an engine may have padding
        return 0 if list(at[where][: len(rows)]) == list(rows) else None
    module, kind = where.rpartition(".")[0].rpartition(".")[0], where.rpartition(".")[2]
    beside = {n: held for n, held in packed.items() if n.rpartition(".")[0].rpartition(".")[0] == module}
    beside = {n: held for n, held in beside.items() if n.endswith(f".{kind}")} or beside
    for held in beside.values():
        if (begin := _begin_of(rows, held)) is not None:
            return begin
    in_layers = "layers." in where
    if beside and in_layers and any(f".{name}." in f".{where}" for names in PACKED for name in names):
        return None
    # of experts, of a module that vLLM has built in another way, or of a head that is the embedding
    around = [held for n, held in packed.items() if module.startswith(n.rpartition(".")[0])] if in_layers else []
    return -1 if any(set(rows) <= set(held) for held in around or at.values()) else None


def _begin_of(rows: Rows, held: Rows) -> int | None:
    """Where in a tensor a weight's rows lie one behind the other; None: nowhere."""
    wanted = list(rows)
    return next((i for i, row in enumerate(held) if row == rows[0] and list(held[i : i + len(rows)]) == wanted), None)
