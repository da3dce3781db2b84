"""Targets with recurrent states are taken with the actors that a run has shown, and where rows have borders."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from spec_plugin_openrlhf.options import of_states
from spec_plugin_verl_check import recurrent

from draft_training.parsing import parsed
from spec_plugin.adapter import source_of
from spec_plugin.api.config import SpecConfig

NEXT: dict[str, Any] = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
SEEING: dict[str, Any] = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
DENSE: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def reasons(hf: dict[str, Any], strategy: str = "fsdp2", packed: bool = False, tried: bool = False) -> list[str]:
    return [o.reason for o in recurrent.objections(hf, strategy, packed, tried)]


def test_the_installed_verl_tells_borders_to_the_layers_of_the_models_that_are_named_alone():
    """Of those that keep states: some forward of verl's own takes them."""
    told = []
    for name in ("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_vl"):
        source = parsed(source_of("verl", f"models/transformers/{name.removesuffix('_moe')}.py"))
        forwards = [node for node in ast.walk(source) if isinstance(node, ast.FunctionDef)]
        if any(
            f.name.endswith("gated_delta_net_forward") and "cu_seqlens" in {a.arg for a in f.args.args}
            for f in forwards
        ):
            told.append(name)
    assert tuple(told) == recurrent.BORDERS_ARE_TOLD


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_they_are_taken_with_fsdp_unless_a_packed_row_has_no_borders(strategy):
    assert reasons(NEXT, strategy) == reasons(SEEING, strategy, packed=True) == []
    assert reasons(NEXT, strategy, packed=True) == ["packed rows through recurrent layers"]
    assert reasons(NEXT, strategy, packed=True, tried=True), "wrong is wrong, tried or not"


def test_other_actors_are_refused_unless_they_are_to_be_tried():
    (found,) = recurrent.objections(SEEING, "megatron", False, tried=False)
    assert "actor_rollout_ref.actor.strategy=megatron" in str(found) and "spec.recurrent_states=try" in str(found)
    assert reasons(SEEING, "megatron", tried=True) == reasons(SEEING, "torchtitan") == [], (
        "the latter is refused anyhow"
    )


def test_other_targets_are_no_concern():
    assert reasons(DENSE, "megatron", packed=True) == [] == list(recurrent.notes(DENSE, packed=True))


def test_a_packed_row_needs_operators_that_know_borders(monkeypatch):
    monkeypatch.setattr(recurrent, "find_spec", lambda name: None)
    assert "flash-linear-attention" in "".join(recurrent.notes(SEEING, packed=True))
    assert not list(recurrent.notes(SEEING, packed=False))
    monkeypatch.setattr(recurrent, "find_spec", lambda name: object())
    assert not list(recurrent.notes(SEEING, packed=True))


def test_deepspeed_actors_are_refused_unless_they_are_to_be_tried():
    (found,) = of_states("policy", NEXT, SpecConfig.parse(None))
    assert "recurrent states in DeepSpeed actors" in str(found)
    assert not list(of_states("policy", NEXT, SpecConfig.parse({"recurrent_states": "try"})))
    assert not list(of_states("policy", DENSE, SpecConfig.parse(None)))
