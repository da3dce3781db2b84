"""Pausing the draft: one instance method of vLLM's proposer is wrapped, so that k = 0 costs no draft forward pass.

==========  ==========================================================================================================
symbol      ``propose`` of the running proposer (the instance, not its class): V1's ``drafter``, V2's ``speculator``
reason      with k = 0 vLLM 0.29 runs the draft and throws its result away: on V1 the first forward pass (it keeps the draft's KV
            cache current for a later step of the same request; plain decoding was up to a fifth slower for it), on V2 all of them
versions    V1: checked on 0.29 (CPU). V2: on 0.29, too, with its kernels in Triton's interpreter, without CUDA graphs
guard       ``PatchError`` if ``propose`` or the speculator have lost what the wrappers read
==========  ==========================================================================================================
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from spec_plugin.api.errors import PatchError

_V1_READS = ("num_speculative_tokens", "common_attn_metadata", "target_token_ids")
_V2_READS = ("input_batch", "dummy_run")


def pause_in_workers(executor: Any, paused: bool) -> bool:
    """From EngineCore's process: have every worker pause its draft, or go on; True if it is paused in all of them.

    ``executor`` is vLLM's, of workers with ``SpecWorkerExtension``.
    """
    done = executor.collective_rpc("spec_pause_draft", args=(paused,))
    return paused and all(done)


def pause_draft(runner: Any, paused: bool) -> bool:
    """In a worker: wrap, or unwrap, the proposer of a model runner; False if this runner has none that could be paused.

    A call that asks for drafts is always served on V1, and on V2 from vLLM 0.32 on. On V2 before, none says how many it
    asks for, so pause only while k is 0 for every batch size.

    Raises:
        PatchError: if ``propose`` no longer has what the wrapper reads.
    """
    if hasattr(runner, "drafter"):
        if not hasattr(runner.drafter, "model"):
            return True  # a look-up: with k = 0 there is no forward pass to leave out
        return _pause(runner.drafter, paused, _V1_READS, _idle_on_v1)
    speculator = getattr(runner, "speculator", None)
    if speculator is None:
        return False
    return _pause(speculator, paused, _V2_READS, _idle_on_v2)


def _pause(proposer: Any, paused: bool, reads: tuple[str, ...], idle: Callable[..., Tensor | None]) -> bool:
    if not paused:
        vars(proposer).pop("propose", None)
        return True
    original = type(proposer).propose.__get__(proposer)
    signature = inspect.signature(original)
    missing = [name for name in reads if name not in signature.parameters]
    if missing:
        raise PatchError(
            f"the draft cannot be paused: {type(proposer).__name__}.propose of this vLLM has no argument {missing[0]!r}; install "
            "a vLLM of the range that spec-plugin declares"
        )

    def propose(*args: Any, **kwargs: Any) -> Tensor:
        nothing = idle(proposer, signature.bind(*args, **kwargs).arguments)
        if nothing is not None:
            return nothing
        drafted: Tensor = original(*args, **kwargs)
        return drafted

    proposer.propose = propose
    return True


def _idle_on_v1(_proposer: Any, arguments: Mapping[str, Any]) -> Tensor | None:
    if arguments.get("num_speculative_tokens") != 0:
        return None
    batch = arguments["common_attn_metadata"].batch_size()
    return torch.empty(batch, 0, dtype=torch.int64, device=arguments["target_token_ids"].device)


def _idle_on_v2(speculator: Any, arguments: Mapping[str, Any]) -> Tensor | None:
    # warm-up, ranks that keep step with each other; and, from vLLM 0.32 on, a step that was scheduled before the pause
    if arguments.get("dummy_run") or arguments.get("num_speculative_tokens"):
        return None
    # what was drafted last; nobody verifies it, since no table asks for drafts of a paused one (channel.put_in_force)
    drafted: Tensor = speculator.draft_tokens[: arguments["input_batch"].num_reqs]
    return drafted
