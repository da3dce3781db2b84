"""Which targets were shown to be drafted for, by the class of vLLM that serves them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

#: what was tried: a whole run of a trainer whose acceptance rose, or the engine and the harvest alone
Shown = Literal["trainer", "engine"]

#: with a tiny policy of each class, by ``spec-plugin conformance --target FAMILY`` and tests/engine/test_families.py
SHOWN: Mapping[str, Shown] = {
    "ArceeForCausalLM": "engine",
    "DeepseekV3ForCausalLM": "trainer",
    "Gemma4ForCausalLM": "trainer",
    "Glm4ForCausalLM": "trainer",
    "Glm4vForConditionalGeneration": "engine",
    "GlmForCausalLM": "trainer",
    "GptOssForCausalLM": "trainer",
    "LlamaForCausalLM": "trainer",
    "Mistral3ForConditionalGeneration": "engine",
    "MistralForCausalLM": "trainer",
    "Phi3ForCausalLM": "engine",
    "Qwen2ForCausalLM": "trainer",
    "Qwen2_5_VLForConditionalGeneration": "engine",
    "Qwen3ForCausalLM": "trainer",
    "Qwen3MoeForCausalLM": "trainer",
    "Qwen3NextForCausalLM": "trainer",
    "Qwen3VLForConditionalGeneration": "trainer",
    "Qwen3_5ForCausalLM": "trainer",
    "Qwen3_5ForConditionalGeneration": "trainer",
    "SeedOssForCausalLM": "trainer",
}
