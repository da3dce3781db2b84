"""What every drafting method tells vLLM alike."""

from __future__ import annotations

import pytest

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.events import TargetInfo
from spec_plugin.engine.lossless import check_speculative_config
from spec_plugin.methods import tables

FIELD = """
class SpeculativeConfig:
    disable_eagle_block_drop: bool = False
"""


@pytest.mark.parametrize(
    ("source", "family", "told"),
    [(FIELD, "qwen3", True), ("", "qwen3", False), (FIELD, "qwen3_next", False)],
    ids=["vLLM 0.31", "before", "no prefix cache"],
)
def test_a_vllm_that_can_keep_whole_hits_in_the_prefix_cache_is_told_to(monkeypatch, source, family, told):
    monkeypatch.setattr(tables, "source_of", lambda package, file: source)
    hf = {"model_type": family, "architectures": ["AnyForCausalLM"]}
    monkeypatch.setattr(tables, "keeps_states", lambda hf: hf["model_type"] == "qwen3_next")
    found = tables.common_settings(SpecConfig(k=3), TargetInfo("", hf, "float32", max_num_seqs=8))
    assert found.get("disable_eagle_block_drop", False) == told
    check_speculative_config({"method": "eagle3", **found})
