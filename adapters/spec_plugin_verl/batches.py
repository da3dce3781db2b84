"""verl's batches, in both layouts: responses nested, or (its older trainers) padded on the right; documents always nested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from verl.workers.utils.padding import no_padding_2_padding, response_from_nested

from spec_plugin.adapter import response_at_the_end

#: verl's words for the policy versions that sampled the first and the last token of a response
_TOLD = _FIRST_VERSION, _LAST_VERSION = "min_global_steps", "max_global_steps"


def padded(values: Tensor) -> Tensor:
    """A nested or padded tensor of verl's as [B, T] on the CPU, zero-padded at the end."""
    dense: Tensor = values.to_padded_tensor(0) if values.is_nested else values
    return dense.detach().cpu()


def ids(data: Any) -> list[Tensor]:
    """Token ids of each whole sequence, on the CPU."""
    return [row.cpu() for row in data["input_ids"].unbind()]


def sampled(data: Any) -> Tensor:
    """Which tokens of the responses the policy sampled, [B, T] bool on the CPU."""
    return padded(data["response_mask"]).bool()


def responses(values: Tensor, data: Any) -> Tensor:
    """[B, T] on the CPU: the responses' part of a pass over whole documents, nested [B, (L)], one behind each token."""
    if data["response_mask"].is_nested:
        return padded(response_from_nested(values, data["response_mask"]))
    return padded(no_padding_2_padding(values, data))


def lengths(data: Any) -> list[int]:
    """Number of tokens of each response, what the policy did not sample (tool output) included."""
    mask = data["response_mask"]
    if mask.is_nested:
        return [len(row) for row in mask.unbind()]
    width = mask.shape[1]
    found: list[int] = data["attention_mask"][:, -width:].sum(1).tolist()
    return found


def cut(data: Any, most: int | None) -> Tensor:
    """[B] bool: responses that verl may have cut: to ``most`` tokens, or where it joins turns.

    Its builders of chat templates trim there what a model's own turn ends with (``removed_prefix_token_count``).
    """
    mask = sampled(data)
    joined = (mask[:, 1:] & ~mask[:, :-1]).any(-1)
    return joined | (torch.tensor(lengths(data)) >= (mask.shape[1] + 1 if most is None else most))


def rollout(data: Any) -> Tensor | None:
    """Log-probs as the engine stated them, [B, T] on the CPU; None where verl's batch has none."""
    return padded(data["rollout_log_probs"]) if "rollout_log_probs" in data.keys() else None  # noqa: SIM118


def starts(data: Any) -> list[int]:
    """Where the response begins in each document."""
    return [len(whole) - n for whole, n in zip(data["input_ids"].unbind(), lengths(data), strict=True)]


def documents(data: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Token ids and response masks of whole sequences."""
    wholes, rows = data["input_ids"].unbind(), data["response_mask"].unbind()
    masks = [response_at_the_end(len(w), row[:n]) for w, row, n in zip(wholes, rows, lengths(data), strict=True)]
    return list(wholes), masks


def said(data: Any) -> list[Mapping[str, Any]]:
    """What verl's servers said beside each response, which older trainers spread over columns; empty where it is not told."""
    if "extra_fields" in data.keys():  # noqa: SIM118
        return list(data["extra_fields"])
    columns = {name: list(data[name]) for name in _TOLD if name in data.keys()}  # noqa: SIM118
    rows = zip(*columns.values(), strict=True)
    return [{name: value for name, value in zip(columns, row, strict=True) if value is not None} for row in rows]


def versions(said: Sequence[Mapping[str, Any]]) -> tuple[Tensor, Tensor] | None:
    """Policy versions that sampled the first and the last token of each sequence; None where verl's batch does not tell."""
    if not said:
        return None
    first, last = torch.tensor([_span(beside) for beside in said], dtype=torch.int64).unbind(1)
    return first, last


def _span(beside: Mapping[str, Any]) -> tuple[int, int]:
    low, high = beside.get(_FIRST_VERSION), beside.get(_LAST_VERSION)
    return (-1, -1) if low is None or high is None else (int(low), int(high))
