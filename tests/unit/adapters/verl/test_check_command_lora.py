"""``spec-plugin check verl`` on the path of a LoRA adapter, which verl takes for two different signs."""

from __future__ import annotations

import pytest
from builders.check_command import MODEL, PATH, VLLM, a_qwen3, needs_verl
from spec_plugin_verl_check import options

from spec_plugin.commands.check import judge_run

ADAPTER = f"{MODEL}lora_adapter_path=an/adapter"
KL = ("actor_rollout_ref.actor.use_kl_loss=True", "algorithm.use_kl_in_reward=True")


@needs_verl
def test_an_adapter_that_verl_does_not_load_is_a_note() -> None:
    found = judge_run("verl", [PATH, VLLM, ADAPTER], a_qwen3)
    assert found.accepted and "lora-adapters" not in found.shapes
    assert any("loads no adapter, and trains all weights" in note for note in found.notes)


@needs_verl
@pytest.mark.parametrize("kl", KL, ids=["in the loss", "in the reward"])
def test_an_adapter_without_its_rank_is_refused_where_verl_would_miss_it_in_the_reference(kl: str) -> None:
    """``FSDPEngine.disable_adapter`` asks the model for what only peft's has, and dies of transformers' own."""
    (said,) = judge_run("verl", [PATH, VLLM, ADAPTER, kl], a_qwen3).objections
    assert said.by == "verl" and "lora_rank" in said.instead and "an/adapter" in str(said)
    found = judge_run("verl", [PATH, VLLM, ADAPTER, kl, f"{MODEL}lora_rank=8", f"{MODEL}lora.merge=True"], a_qwen3)
    assert found.accepted, list(map(str, found.objections))


def test_whether_verl_asks_the_actor_for_the_reference_is_looked_up_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "source_of", lambda package, file: "self.ref_in_actor = lora_rank > 0")
    assert not options.misses_an_adapter()
