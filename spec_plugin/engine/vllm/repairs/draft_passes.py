"""As many passes of a draft as a step asks for tokens, on vLLM's second model runner, which runs ``spec.k`` whatever is asked."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from spec_plugin.engine.vllm.repairs.patches import Guard, Patch

#: of a speculator: the passes that the step at hand asks for; None: all
_PASSES = "spec_passes"
_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.autoregressive.speculator:AutoRegressiveSpeculator"


def _every_pass_is_run(function: Callable[..., Any]) -> bool:
    """True of a function that is not ours, of a vLLM whose draft is not told how many tokens are asked for."""
    try:
        from vllm.v1.worker.gpu.spec_decode.autoregressive.speculator import AutoRegressiveSpeculator
    except ImportError:  # an older V2, which goes on to run all of them
        return False
    told = "num_speculative_tokens" in inspect.signature(AutoRegressiveSpeculator.propose).parameters
    return not told and not getattr(function, "follows_k", False)


def _keeps_step(speculator: Any) -> bool:
    """Do other ranks of data parallelism run its passes with it: also those that have no request and are asked for none."""
    return bool(getattr(speculator, "dp_size", 1) > 1)


def _noting_k(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        speculator = getattr(self, "speculator", None)
        if speculator is not None:
            asked = scheduler_output.num_spec_tokens_to_schedule
            # what asks for none before any step has asked for some is a warm-up
            begun = asked > 0 or getattr(speculator, _PASSES, None) is not None
            dummy = kwargs.get("dummy_run", len(args) > 1 and args[1])
            follows = begun and not dummy and not _keeps_step(speculator)
            setattr(speculator, _PASSES, max(1, asked) if follows else None)
        return original(self, scheduler_output, *args, **kwargs)

    execute_model.follows_k = True  # type: ignore[attr-defined]
    return execute_model


def _up_to_k(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _multi_step_decode(self: Any, *args: Any, **kwargs: Any) -> None:
        passes, whole = getattr(self, _PASSES, None), self.num_speculative_steps
        if passes is None:
            original(self, *args, **kwargs)
            return
        self.num_speculative_steps = min(whole, passes)
        try:
            original(self, *args, **kwargs)
        finally:
            self.num_speculative_steps = whole

    _multi_step_decode.follows_k = True  # type: ignore[attr-defined]
    return _multi_step_decode


def _one_by_one(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _configure_fused_multi_step_decode(self: Any) -> None:
        original(self)
        if self.advance_draft_positions and not _keeps_step(
            self
        ):  # else all passes are run, which fused ones do for less
            self.use_fused_multi_step_decode = False

    _configure_fused_multi_step_decode.follows_k = True  # type: ignore[attr-defined]
    return _configure_fused_multi_step_decode


def _patch(name: str, symbol: str, replacement: Any, guard: Guard) -> Patch:
    return Patch(
        name=name,
        symbol=symbol,
        reason="a step that asks for fewer than spec.k drafted tokens runs spec.k passes of the draft, whose tokens "
        "nobody verifies; where passes are fused into one CUDA graph, they are taken apart into one each",
        upstream="mended in 0.32.0, whose draft is told k",
        versions="0.26.0 and 0.29.0, sources read; run on 0.29.0, with V2's kernels in Triton's interpreter, without CUDA graphs",
        needed=_every_pass_is_run,
        replacement=replacement,
        guard=guard,
        optional=True,
    )


#: for an engine that drafts on the V2 model runner, before its worker is made
PASS_PATCHES = (
    _patch(
        "draft_passes_asked",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
        _noting_k,
        Guard(None, ("scheduler_output", "dummy_run", "if not dummy_run:")),
    ),
    _patch(
        "draft_passes_run",
        f"{_SPECULATOR}._multi_step_decode",
        _up_to_k,
        Guard(None, ("for step in range(1, self.num_speculative_steps):", "self.current_draft_step.fill_(step)")),
    ),
    _patch(
        "draft_passes_apart",
        f"{_SPECULATOR}._configure_fused_multi_step_decode",
        _one_by_one,
        Guard(("self",), ("self.use_fused_multi_step_decode", "self.advance_draft_positions")),
    ),
)
