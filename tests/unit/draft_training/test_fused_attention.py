"""The attention of an unroll in torch's fused kernels, against explicit scores, and what is done where a kernel is not right."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from draft_training import attention, fused_attention
from draft_training.attention import explicit_column_attention, proven_kernel
from draft_training.fused_attention import CPU, EFFICIENT, fused_column_attention, kernel_for

HOST = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _asked_anew() -> Any:
    proven_kernel.cache_clear()
    yield
    proven_kernel.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [4, 32, 80, 128])
def test_the_cpus_kernel_is_as_exact_as_explicit_scores(dtype: torch.dtype, head_dim: int) -> None:
    assert proven_kernel(HOST, dtype, head_dim) is CPU


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_output_and_gradients_are_those_of_explicit_scores(steps: int, heads: int, kv_heads: int, rows: int) -> None:
    own = torch.Generator().manual_seed(steps)

    def leaf(width: int) -> torch.Tensor:
        return torch.randn(2, rows, width, 16, generator=own, dtype=torch.float64).requires_grad_()

    q, pairs = leaf(heads), [(leaf(kv_heads), leaf(kv_heads)) for _ in range(steps)]
    leaves = [q, *(t for pair in pairs for t in pair)]
    slope = torch.randn(q.shape, generator=own, dtype=torch.float64)
    found, wanted = (f(q, pairs) for f in (partial(fused_column_attention, CPU), explicit_column_attention))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad((out * slope).sum(), leaves) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def wrong(which: str) -> fused_attention.Kernel:
    """The CPU's kernel with a mistake that another release of torch might bring."""

    def forward(q: Any, k: Any, v: Any) -> Any:
        out, lse, rest = CPU.forward(q, k, v)
        return {
            "log-sum-exp in base 2": (out, lse / 0.6931, rest),
            "no causal mask": (torch.nn.functional.scaled_dot_product_attention(q, k, v), lse, rest),
            "no log-sum-exp": (out, torch.full_like(lse, float("nan")), rest),
        }.get(which, (out, lse, rest))

    def backward(*arguments: Any) -> Any:
        if which == "another signature":
            raise TypeError("expected 9 arguments")
        dq, dk, dv = CPU.backward(*arguments)
        return {"gradients swapped": (dq, dv, dk), "a gradient scaled": (dq * 1.2, dk, dv)}.get(which, (dq, dk, dv))

    return replace(CPU, forward=forward, backward=backward)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "which",
    [
        "log-sum-exp in base 2",
        "no causal mask",
        "no log-sum-exp",
        "another signature",
        "gradients swapped",
        "a gradient scaled",
    ],
)
def test_a_kernel_that_is_wrong_is_not_used_and_one_warning_says_so(
    which: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention, "kernel_for", lambda *_: wrong(which))
    q = torch.randn(1, 9, 2, 32, dtype=dtype)
    pairs = [(torch.randn(1, 9, 2, 32, dtype=dtype), torch.randn(1, 9, 2, 32, dtype=dtype)) for _ in range(2)]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(attention.column_attention(q, pairs), explicit_column_attention(q, pairs))
    assert [r for r in caplog.records if "explicit scores, which is slower" in r.message] == caplog.records
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "kernel"),
    [
        ("cuda", torch.float32, 128, EFFICIENT),
        ("cuda", torch.float64, 128, None),
        ("cuda", torch.float32, 90, None),
        ("cuda", torch.bfloat16, 128, None),
        ("npu", torch.bfloat16, 128, None),
        ("meta", torch.float32, 128, None),
    ],
)
def test_which_kernel_serves(device: str, dtype: torch.dtype, head_dim: int, kernel: Any) -> None:
    assert kernel_for(device, dtype, head_dim) is kernel


def test_a_cards_kernel_takes_and_returns_what_is_expected() -> None:
    """On tensors without memory, by torch's own rules of these operations: no card is needed for that, and no value is seen."""

    def leaf(heads: int) -> torch.Tensor:
        return torch.empty(2, 37, heads, 64, device="meta").requires_grad_()

    q, pairs = leaf(4), [(leaf(2), leaf(2)) for _ in range(3)]
    out = fused_column_attention(EFFICIENT, q, pairs)
    assert out.shape == q.shape and out.dtype == q.dtype
    leaves = [q, *(t for pair in pairs for t in pair)]
    for leaf_, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert grad.shape == leaf_.shape and grad.dtype == q.dtype


def test_keys_and_values_are_kept_once_and_not_for_each_query_head() -> None:
    q = torch.randn(1, 64, 8, 16).requires_grad_()
    pairs = [(torch.randn(1, 64, 1, 16), torch.randn(1, 64, 1, 16)) for _ in range(3)]
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fused_column_attention(CPU, q, pairs)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    own = q.nbytes + sum(t.nbytes for pair in pairs for t in pair)
    assert sum(storages.values()) <= own + q.nbytes + 8 * 64 * 4, (
        "beside what is there: the output and a number a row and head"
    )
