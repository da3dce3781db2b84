"""vLLM's cumulative acceptance counters, read in the process that owns the engine's front end."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

_PREFIX = "vllm:spec_decode_num_"


def read_spec_counters() -> dict[str, Any]:
    """What speculation did since this process started, summed over engines.

    Needs ``disable_log_stats=False``; without it, and before the first draft, everything is zero.

    Returns:
        ``drafts`` (verification steps), ``draft_tokens``, ``accepted_tokens`` and ``accepted_per_pos``, a list.
    """
    from vllm.v1.metrics.reader import get_metrics_snapshot  # the trainer's other processes never need it

    counts: dict[str, Any] = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0, "accepted_per_pos": []}
    for metric in get_metrics_snapshot():
        name = metric.name.removeprefix(_PREFIX)
        if not metric.name.startswith(_PREFIX):
            continue
        if name == "accepted_tokens_per_pos":
            sums = zip_longest(counts["accepted_per_pos"], metric.values, fillvalue=0)
            counts["accepted_per_pos"] = [int(a + b) for a, b in sums]
        elif name in counts:
            counts[name] += int(metric.value)
    return counts
