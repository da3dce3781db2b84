"""Which class of the installed vLLM would serve a target: reading its sources says what importing it says."""

from __future__ import annotations

import pytest

from spec_plugin.plan.engine_class import engine_class

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    "name",
    ["Qwen3MoeForCausalLM", "GptOssForCausalLM", "Gemma3ForCausalLM", "MixtralForCausalLM", "GlmForCausalLM"],
)
def test_reading_says_what_importing_says(name: str) -> None:
    from vllm import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_eagle3

    read = engine_class({"architectures": [name]})
    assert read is not None
    assert read.hands_out_states == bool(supports_eagle3(ModelRegistry._try_load_model_cls(name)))
