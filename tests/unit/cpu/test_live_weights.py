"""Linear layers of vLLM's CPU build compute with a packed copy, and never with an old one. No vLLM: a fake packs."""

from __future__ import annotations

import torch
from spec_plugin_cpu.repairs.compat import live_gemm, weights_are_dead
from torch import nn
from torch.nn.functional import linear


def packing(layer, remove_weight):
    """As vLLM's: computes with a copy made once, and drops the Parameter if told to."""
    if layer.weight.ndim != 2:
        return
    copy = layer.weight.detach().clone()
    layer.cpu_linear = lambda x, weight, bias: linear(x, copy, bias)
    if remove_weight:
        layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


def make_layer(weight=None):
    layer = nn.Linear(4, 4, bias=False).requires_grad_(False)
    if weight is not None:
        layer.weight = weight
    layer.weight.weight_loader = getattr(layer.weight, "weight_loader", lambda p, loaded: p.data.copy_(loaded))
    return layer


def output(layer):
    return layer.cpu_linear(torch.ones(1, 4), layer.weight, None)


def test_the_probe_finds_the_fault_and_the_repair_removes_it():
    assert weights_are_dead(packing)
    assert not weights_are_dead(live_gemm(packing))


def test_a_loaded_weight_is_used_at_once_and_packed_at_the_next_dispatch():
    layer, dispatch = make_layer(), live_gemm(packing)
    dispatch(layer, True)
    packed = layer.cpu_linear
    for value in (1.0, 2.0, 3.0):
        layer.weight.weight_loader(layer.weight, torch.full((4, 4), value))
        assert layer.cpu_linear is not packed and torch.equal(output(layer), torch.full((1, 4), 4 * value))
        dispatch(layer, True)
        assert torch.equal(output(layer), torch.full((1, 4), 4 * value))
    assert len(layer.weight.spec_layers) == 1, "not wrapped again at each dispatch"


def test_a_tied_weight_unpacks_every_layer_that_uses_it():
    first, dispatch = make_layer(), live_gemm(packing)
    second = make_layer(first.weight)
    dispatch(first, True)
    dispatch(second, False)
    first.weight.weight_loader(first.weight, torch.full((4, 4), 2.0))
    assert output(first).sum() == output(second).sum() == 32


def test_what_is_no_linear_layer_keeps_the_originals_treatment():
    convolution = nn.Conv1d(4, 4, 1)
    live_gemm(packing)(convolution, True)
    assert not hasattr(convolution, "cpu_linear") and convolution.weight.ndim == 3
