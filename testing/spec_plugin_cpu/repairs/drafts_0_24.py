"""What the CPU build of vLLM 0.24 alone needs before it can speculate; 0.25.1 and later have mended both."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from spec_plugin.engine.vllm.repairs.patches import Guard, Patch


def recovered_is_refused(function: Callable[..., Any]) -> bool:
    """True if ``function`` does not take all that the rejection sampler passes, for the token behind a refused draft."""
    recovered, one = torch.full((1,), 7, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    target, noise = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[1.0, 2.0, 1.0]])
    options = {"NO_DRAFT_PROBS": True, "USE_FP64_GUMBEL": False}
    try:
        function(recovered, one, torch.tensor([0]), None, target, noise, 3, 8192, **options)
    except TypeError as error:
        if "USE_FP64_GUMBEL" not in str(error):
            raise
        return True
    return False


def with_noise_in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
    """The original, which takes USE_FP64_GUMBEL and casts the noise to the float32 that the kernel reads."""

    @functools.wraps(original)
    def recovered(*args: Any, USE_FP64_GUMBEL: bool = False, **kwargs: Any) -> Any:
        return original(*args[:5], args[5].to(torch.float32), *args[6:], **kwargs)

    return recovered


def drafts_have_one_width(function: Callable[..., Any]) -> bool:
    """True if this step of vLLM's CPU runner assumes that each row of drafts is ``num_spec_tokens`` wide."""
    if not function.__qualname__.startswith("CPUModelRunner."):
        return False  # the GPU runner's, which looks at what was drafted
    runner = SimpleNamespace(
        use_async_scheduling=False,
        input_batch=SimpleNamespace(req_ids=["a", "b"]),
        _draft_token_req_ids=["a", "b"],
        _draft_token_ids=torch.ones(2, 2, dtype=torch.int64),
        draft_token_ids_cpu=torch.zeros(2, 3, dtype=torch.int64),
    )
    try:
        found = function(runner, *([] if function.__name__.startswith("_get") else [None]))
    except RuntimeError:
        return True
    return found is not None and len(found[0][0]) != 2


def as_wide_as_drafted(original: Callable[..., Any]) -> Callable[..., Any]:
    """The original, run on as many columns as were drafted."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        whole, drafts = self.draft_token_ids_cpu, self._draft_token_ids
        if whole is None or not torch.is_tensor(drafts):
            return original(self, *args, **kwargs)
        self.prev_num_spec_tokens = drafts.shape[1]  # what vLLM's GPU version notes here
        self.draft_token_ids_cpu = whole[:, : drafts.shape[1]]
        try:
            return original(self, *args, **kwargs)
        finally:
            self.draft_token_ids_cpu = whole

    return method


def _width(name: str, method: str, *parameters: str) -> Patch:
    return Patch(
        name=name,
        symbol=f"vllm.v1.worker.cpu_model_runner:CPUModelRunner.{method}",
        reason="an engine whose k changes died of the first step that drafted another number of tokens than spec.k",
        upstream="mended in 0.25.1",
        versions="0.24.0",
        optional=True,
        needed=drafts_have_one_width,
        replacement=as_wide_as_drafted,
        guard=Guard(parameters=("self", *parameters), landmarks=("self.draft_token_ids_cpu[",)),
    )


DRAFTS_0_24 = (
    Patch(
        name="recovered_tokens",
        symbol="vllm.utils.cpu_triton_utils:sample_recovered_tokens_kernel.func",
        reason="the first step that sampled with drafts killed the engine: the sampler passes an argument, USE_FP64_GUMBEL, "
        "that its CPU kernel does not take",
        upstream="mended in 0.25.1",
        versions="0.24.0",
        optional=True,
        needed=recovered_is_refused,
        replacement=with_noise_in_float32,
        guard=Guard(
            parameters=(
                "output_token_ids",
                "cu_num_draft_tokens",
                "draft_token_ids",
                "draft_probs",
                "target_probs",
                "inv_q",
                "vocab_size",
                "BLOCK_SIZE",
                "NO_DRAFT_PROBS",
            ),
            landmarks=("torch.ops._C.sample_recovered_tokens_kernel_impl(",),
        ),
    ),
    _width("draft_width_in", "_copy_draft_token_ids_to_cpu", "scheduler_output", "zeros_only"),
    _width("draft_width_out", "_get_draft_token_ids_cpu"),
)
