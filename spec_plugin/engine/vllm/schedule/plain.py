"""Requests that are decoded without drafts beside others that have some, and drafts cut to the table of k."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: value of ``SamplingParams.extra_args`` that keeps one request plain; a list [from, to): only these tokens of the response
PLAIN = {"spec_off": True}


def is_plain(request: Any) -> bool:
    """True when the request asked not to be speculated on, at all or where it is now."""
    params = request.sampling_params
    off = params.extra_args.get("spec_off") if params is not None and params.extra_args else None
    if not isinstance(off, list):
        return bool(off)
    now: int = request.num_output_tokens + getattr(request, "num_output_placeholders", 0)
    return bool(off[0] <= now < off[1])


def clear_plain(requests: Mapping[str, Any], request_ids: Iterable[str]) -> None:
    """Take the drafted tokens of the next step away from those of these requests that are plain.

    Args:
        requests: the scheduler's, by id; one that is gone is passed over.
        request_ids: of those that vLLM has just given drafts, or placeholders for some.
    """
    for request_id in request_ids:
        request = requests.get(request_id)
        if request is not None and request.spec_token_ids and is_plain(request):
            request.spec_token_ids = []


def keep_to_table(requests: Mapping[str, Any], request_ids: Sequence[str], table: Sequence[int] | None) -> None:
    """Cut drafts to the k of their batch size: the V2 model runner always drafts as much as it can.

    Args:
        requests: the scheduler's, by id; one that is gone is passed over.
        request_ids: all that vLLM has just given drafts: their number is the batch size.
        table: k by batch size; None, or without an entry for this size: nothing is cut.
    """
    if table is None or len(request_ids) >= len(table):
        return
    k = table[len(request_ids)]
    for request_id in request_ids:
        request = requests.get(request_id)
        if request is not None and len(request.spec_token_ids) > k:
            request.spec_token_ids = request.spec_token_ids[:k]
