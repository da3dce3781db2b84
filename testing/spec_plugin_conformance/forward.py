"""Harvested hidden states against a plain forward pass of transformers, document by document and token by token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from draft_training.outside import text_part
from spec_plugin.trainer.decoder import find_decoder, load_policy

#: largest relative error of one token's vector, by the coarser of the dtypes that computed it
TOLERANCE = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 0.2}
#: by this factor a shift by one token must be worse than the tolerance, or the comparison says nothing
_CLEAR = 2.0


@dataclass(frozen=True)
class Pack:
    """One harvest that the recorder kept: documents behind one another, N tokens in all, of A layers of width H."""

    input_ids: Tensor  # [N]
    aux: Tensor  # [N, A * H]
    last: Tensor  # [N, H]
    loss_mask: Tensor  # [N] bool
    lengths: tuple[int, ...]
    policy_version: int
    offsets: tuple[int, ...] = ()  # tokens of each document before its first one here; (): none

    def documents(self) -> list[slice]:
        """The tokens of each document, as slices of [0, N)."""
        out, offset = [], 0
        for n in self.lengths:
            out.append(slice(offset, offset + n))
            offset += n
        return out

    def masks(self, sequences: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Loss masks of the documents that hold a whole response, as lists of bools, for ``judge.response_lengths``.

        Args:
            sequences: prompts and responses that the engine sampled; a document that is a part of one of them is left out if
                that begins, or goes on, outside it.
        """
        found, documents = [], []
        for place, offset in zip(self.documents(), self.places(), strict=True):
            mask = self.loss_mask[place].tolist()
            whole = sequence_of(self.input_ids[place], offset, sequences) if any(self.offsets) else None
            goes_on = whole is not None and len(whole) > offset + len(mask)
            if not goes_on and not (offset and mask[0]):
                found.append(mask)
                documents.append(self.input_ids[place].tolist())
        return {"policy_version": self.policy_version, "masks": found, "documents": documents}

    def places(self) -> Sequence[int]:
        """Tokens before each document."""
        return self.offsets or [0] * len(self.lengths)


def sequence_of(ids: Tensor, offset: int, sequences: Sequence[Sequence[int]]) -> Sequence[int] | None:
    """The sequence that has these tokens [n] in this place; None if there is none."""
    wanted = ids.tolist()
    return next((s for s in sequences if list(s[offset : offset + len(wanted)]) == wanted), None)


def read_pack(file: Path) -> Pack:
    """Read one safetensors file of the recorder."""
    found = load_file(file)
    lengths = tuple(found["lengths"].tolist())
    version = int(found["policy_version"])
    offsets = tuple(found["offsets"].tolist())
    return Pack(found["input_ids"], found["aux"], found["last"], found["loss_mask"].bool(), lengths, version, offsets)


def plain_forward(
    target: Path, documents: Sequence[Tensor], aux_layers: Sequence[int], dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """What enters the auxiliary layers and what leaves the final norm, ([n, A * H], [n, H]) for each document alone."""
    model = load_policy(target, dtype)
    seen: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(_module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            seen[layer] = (args[0] if args else kwargs["hidden_states"])[0]

        return hook

    decoder = find_decoder(model)
    places = [*decoder.layers, decoder.norm]
    for layer in aux_layers:
        places[layer].register_forward_pre_hook(keep(layer), with_kwargs=True)
    decoder.norm.register_forward_hook(lambda _m, _a, out: seen.__setitem__(-1, out[0]))
    out = []
    for ids in documents:
        with torch.no_grad():
            model(input_ids=ids[None], use_cache=False)
        aux = [seen[layer] for layer in sorted(aux_layers)]
        out.append((torch.cat([seen[-1][:, :0], *aux], dim=-1), seen[-1]))
    return out


def compare(name: str, found: Tensor, expected: Tensor, tolerance: float, parts: int = 1) -> list[str]:
    """Problems of one document's vectors.

    Args:
        name: of the document and the kind of state.
        found: [n, parts * H] as harvested.
        expected: [n, parts * H] of the plain forward pass.
        tolerance: allowed relative error of one token.
        parts: vectors of one token, each compared alone.
    """
    if found.shape != expected.shape:
        return [f"{name}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"]
    problems: list[str] = []
    if not parts:
        return problems
    for i, (a, b) in enumerate(zip(found.float().chunk(parts, -1), expected.float().chunk(parts, -1), strict=True)):
        what = name if parts == 1 else f"{name} {i}"
        error = _relative(a, b)
        if not float(error.max()) <= tolerance:  # NaN too
            worst = int(error.nan_to_num(torch.inf).argmax())
            problems.append(f"{what}: relative error {float(error[worst]):.3g} at token {worst}, allowed {tolerance:g}")
        if len(b) > 2 and float(_relative(b[1:], b[:-1]).median()) < _CLEAR * tolerance:
            problems.append(f"{what}: neighbouring tokens are so alike that a shift by one could not be seen")
    return problems


def other_layers(
    name: str,
    pack: Pack,
    documents: Sequence[Tensor],
    expected: Sequence[tuple[Tensor, Tensor]],
    target: Path,
    aux_layers: Sequence[int],
) -> list[str]:
    """Is a harvested state closer to what enters a neighbouring layer than to what enters its own?

    Residual streams change little from layer to layer, so that a coarse dtype's tolerance alone would let one through.
    """
    problems: list[str] = []
    parts, layers = len(aux_layers), _layers(target)
    right = torch.cat([aux for aux, _ in expected])
    if pack.aux.shape != right.shape or not parts:
        return []  # ``compare`` reports it
    own, found = (x.float().chunk(parts, -1) for x in (right, pack.aux))
    for step in (-1, 1):
        if max(aux_layers) + step > layers:
            continue  # behind the final norm there is no layer
        moved = plain_forward(target, documents, [layer + step for layer in aux_layers], pack.aux.dtype)
        others = (
            torch.cat([aux[before:] for (aux, _), before in zip(moved, pack.places(), strict=True)])
            .float()
            .chunk(parts, -1)
        )
        for i, layer in enumerate(aux_layers):
            here, there = (float(_relative(found[i], x[i]).median()) for x in (own, others))
            if not here < there:
                problems.append(
                    f"{name} input of layer {layer}: relative error {here:.3g}, but {there:.3g} against layer "
                    f"{layer + step}: the wrong layer was harvested"
                )
    return problems


def _layers(target: Path) -> int:
    return int(text_part(json.loads((target / "config.json").read_text()))["num_hidden_layers"])


def _relative(a: Tensor, b: Tensor) -> Tensor:
    error: Tensor = torch.linalg.vector_norm(a - b, dim=-1) / torch.linalg.vector_norm(b, dim=-1).clamp_min(1e-12)
    return error


def _from_their_beginning(pack: Pack, sequences: Sequence[Sequence[int]]) -> tuple[list[Tensor], list[str]]:
    """Each document with what stands before it, and what is wrong with those of which nobody knows that."""
    documents, strange = [], []
    for j, (place, before) in enumerate(zip(pack.documents(), pack.places(), strict=True)):
        ids = pack.input_ids[place]
        if before:
            if (whole := sequence_of(ids, before, sequences)) is None:
                strange.append(f"document {j}: no sampled sequence has these {len(ids)} tokens behind {before} others")
                continue
            ids = torch.tensor(list(whole[: before + len(ids)]))
        documents.append(ids)
    return documents, strange


def judge_packs(
    packs: Sequence[Pack],
    target: Path,
    aux_layers: Sequence[int],
    dtypes: Sequence[str],
    sequences: Sequence[Sequence[int]] = (),
) -> list[str]:
    """Every document of every pack against the target's own forward pass.

    Args:
        packs: of policy version 0 only.
        target: checkpoint of that version.
        aux_layers: layers whose input was harvested.
        dtypes: in which the trainer computes, besides the packs' own.
        sequences: prompts and responses that the engine sampled: what stands before a document that is a part of one.
    """
    problems = []
    for i, pack in enumerate(packs):
        names = [str(pack.last.dtype).removeprefix("torch."), *dtypes]
        tolerance = max(TOLERANCE[n] for n in names)
        documents, strange = _from_their_beginning(pack, sequences)
        if strange:
            problems += [f"pack {i} {what}" for what in strange]
            continue
        plain = plain_forward(target, documents, aux_layers, pack.last.dtype)
        expected = [(aux[n:], last[n:]) for (aux, last), n in zip(plain, pack.places(), strict=True)]
        for j, (place, (aux, last)) in enumerate(zip(pack.documents(), expected, strict=True)):
            where = f"pack {i} document {j}"
            problems += compare(f"{where} input of layer", pack.aux[place], aux, tolerance, len(aux_layers))
            problems += compare(f"{where} final norm", pack.last[place], last, tolerance)
        problems += other_layers(f"pack {i}", pack, documents, expected, target, aux_layers)
    return problems
