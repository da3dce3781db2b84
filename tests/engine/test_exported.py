"""A draft that ``spec-plugin export`` has written, served by vLLM: it drafts what it drafted before."""

from __future__ import annotations

from pathlib import Path

import pytest
import small
from method_engines import K, counted

from draft_training.exports import Verifier, for_sglang, for_speculators, for_vllm, write_export

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("layout", ["vllm", "sglang", "speculators"])
def test_vllm_loads_each_layout_and_all_of_a_good_drafts_tokens_are_accepted(
    layout: str, target: Path, greedy_reference: list[list[int]], tmp_path: Path
) -> None:
    config = small.draft_config(target)
    hf = {
        "vllm": lambda: for_vllm(config),
        "sglang": lambda: for_sglang(config),
        "speculators": lambda: for_speculators(config, Verifier(str(target), ["Qwen3ForCausalLM"]), K),
    }[layout]()
    write_export(tmp_path / "out", config, hf, small.good_tensors(config))
    said, drafts, accepted = counted(small.start_engine(target, tmp_path / "out"))
    assert said == greedy_reference
    assert drafts > 0 and accepted / drafts > 0.9 * K
