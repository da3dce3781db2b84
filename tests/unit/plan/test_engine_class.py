"""Which class of the installed vLLM would serve a target, and what it can do: read from the sources, as importing says it."""

from __future__ import annotations

import pytest

from spec_plugin.plan import completable
from spec_plugin.plan import engine_class as module
from spec_plugin.plan.completable import COMPLETABLE
from spec_plugin.plan.engine_class import EngineClass, architectures, engine_class, unreadable
from spec_plugin.plan.sources import source_of

#: as `supports_eagle3` of vLLM 0.29 answers, by the way that a class comes by it
TAKES = {
    "Qwen3ForCausalLM": "says so itself",
    "MistralForCausalLM": "of llama.py's class",
    "MiMoForCausalLM": "of qwen2.py's",
    "DeepseekV3ForCausalLM": "of a class in the same file",
    "GlmForCausalLM": "of llama.py's, in another file",
    "Qwen3VLMoeForConditionalGeneration": "of another class for images",
    "Mistral3ForConditionalGeneration": "says so itself",
}
TAKES_NOT = ("Gemma3ForCausalLM", "HYV3ForCausalLM", "MiniCPMO", "Glm4vMoeForConditionalGeneration")


@pytest.mark.parametrize("name", [*TAKES, *TAKES_NOT])
def test_a_class_takes_drafts_or_not(name: str) -> None:
    found = engine_class({"architectures": [name]})
    assert found is not None and found.hands_out_states == (name in TAKES)
    assert (unreadable({"architectures": [name]}) is None) == (name in TAKES)


@pytest.mark.parametrize("name", COMPLETABLE)
def test_a_class_that_lacks_only_the_interface_is_completed_and_still_needs_it(name: str) -> None:
    found = engine_class({"architectures": [name]})
    assert found is not None and found.name == name and found.hands_out_states
    assert "SupportsEagle3" not in found.bases, "vLLM has repaired it: its line in completable.py can go"
    assert not COMPLETABLE[name].changed


@pytest.mark.parametrize("name", COMPLETABLE)
def test_a_class_that_was_rewritten_is_not_completed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = COMPLETABLE[name].relies_on[COMPLETABLE[name].module][0]
    monkeypatch.setattr(completable, "source_of", lambda package, file: source_of(package, file).replace(lost, ""))
    assert lost in COMPLETABLE[name].changed
    reason, why = unreadable({"architectures": [name]}) or ("", "")
    assert reason == f"no hidden states from vLLM's {name}" and "hands no hidden states" in why


def test_a_config_without_architectures_is_of_transformers_causal_lm() -> None:
    assert architectures({"model_type": "qwen3_moe"}) == ["Qwen3MoeForCausalLM"]
    assert architectures({"model_type": "x", "architectures": ["A", "B"]}) == ["A", "B"]
    assert architectures({"text_config": {"model_type": "qwen3"}}) == ["Qwen3ForCausalLM"]
    assert architectures({}) == []


def test_what_only_transformers_knows_is_served_by_vllms_class_around_it() -> None:
    found = engine_class({"model_type": "vaultgemma"})
    assert found is not None and found.name == "TransformersForCausalLM" and found.hands_out_states


def test_what_nobody_knows_is_refused_for_a_new_draft_alone() -> None:
    hf = {"architectures": ["OfTomorrowForCausalLM"]}
    assert engine_class(hf) is None and unreadable(hf, newborn=False) is None
    assert "OfTomorrowForCausalLM" in (unreadable(hf) or ("", ""))[1]


def test_without_vllm_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = (module._registry, module._class_of, module._outline)
    for cached in caches:
        cached.cache_clear()
    monkeypatch.setattr(module, "source_of", lambda package, file: "")
    try:
        assert engine_class({"architectures": ["SeedOssForCausalLM"]}) is None
        assert unreadable({"architectures": ["SeedOssForCausalLM"]}) is None
    finally:
        monkeypatch.undo()
        for cached in caches:
            cached.cache_clear()


def test_a_class_says_what_it_can_by_its_bases() -> None:
    assert (
        EngineClass("A", frozenset({"SupportsEagle3"})).hands_out_states
        and not EngineClass("A", frozenset()).hands_out_states
    )
