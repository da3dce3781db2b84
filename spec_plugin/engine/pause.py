"""Pausing the draft: one instance method of vLLM's proposer is wrapped, so that k = 0 costs no draft forward pass.

==========  ==========================================================================================================
symbol      ``propose`` of the running proposer (the instance, not its class)
reason      with k = 0 vLLM 0.29 runs the draft's first forward pass and throws its result away (it keeps the draft's KV
            cache current for a later step of the same request); plain decoding was up to a fifth slower for it
versions    checked on 0.29 (V1 runner, CPU)
guard       ``PatchError`` if ``propose`` has lost the two arguments that the wrapper reads
==========  ==========================================================================================================
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from spec_plugin.errors import PatchError

_READS = ("num_speculative_tokens", "common_attn_metadata")


def pause_draft(proposer: Any, paused: bool) -> None:
    """Wrap, or unwrap, the proposer of a V1 model runner; a call that asks for drafts is always served.

    Raises:
        PatchError: if ``propose`` no longer has the arguments that the wrapper reads.
    """
    if not paused:
        vars(proposer).pop("propose", None)
        return
    original = type(proposer).propose.__get__(proposer)
    missing = [name for name in _READS if name not in inspect.signature(original).parameters]
    if missing:
        raise PatchError(
            f"{type(proposer).__name__}.propose has no argument {missing[0]!r}: the pause does not fit this vLLM; use one of "
            "the range that spec-plugin declares"
        )

    def propose(*args: Any, **kwargs: Any) -> Tensor:
        k = kwargs.get("num_speculative_tokens")
        if k == 0:
            batch = kwargs["common_attn_metadata"].batch_size()
            return torch.empty(batch, 0, dtype=torch.int64, device=kwargs["target_token_ids"].device)
        drafted: Tensor = original(*args, **kwargs)
        return drafted

    proposer.propose = propose
