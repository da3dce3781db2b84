"""Full CUDA graphs on vLLM's V1 model runner although k changes: ``spec.full_graphs``.

Where its config holds a table of k, vLLM makes graphs piecewise on V1 (0.24 and 0.29,
``VllmConfig._maybe_override_dynamic_sd_cudagraph_mode``, "for reliability"). V1 itself takes k from the scheduler's output in
each step, and replays a full graph only for batches whose requests all have spec.k drafts; others run piecewise. So vLLM is told
of no table, and our scheduler makes its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from spec_plugin.model_runner import SWITCH, runner_of

_TABLE = "num_speculative_tokens_per_batch_size"


def keep_full_graphs(settings: Mapping[str, Any], device_type: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What to tell vLLM instead, and our own part of ``additional_config``; the same again for an engine on V2.

    Without a table a vLLM whose V2 runner cannot change k would choose V2: this process and its children are told V1.

    Args:
        settings: the engine's ``speculative_config``.
        device_type: "cpu" or "cuda".
    """
    if _TABLE not in settings or runner_of(settings, device_type).v2:
        return dict(settings), {}
    os.environ[SWITCH] = "0"
    return {name: value for name, value in settings.items() if name != _TABLE}, {"own_table": True}
