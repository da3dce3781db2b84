"""Targets of other families than the one that the engine tests are about: verified, refreshed and drafted for."""

from __future__ import annotations

from pathlib import Path

import pytest
import small
from safetensors.torch import save_file
from test_refresh import acceptance_length

from draft_training import digest
from draft_training.checkpoint import save_draft

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("family", ["mistral"])
def test_a_family_is_drafted_for_and_says_what_it_says_in_transformers(family: str, tmp_path: Path) -> None:
    target = small.make_target(tmp_path / "target", family)
    config, folder = small.draft_config(target), tmp_path / "draft"
    save_draft(folder, config, small.draft_tensors(config, seed=1))
    # the worker in a process of its own: this one may have an engine already
    llm = small.start_engine(target, folder, distributed_executor_backend="mp")
    try:
        reference = small.reference(target)
        assert small.greedy(llm) == reference and acceptance_length(llm) < 1.5
        tensors = small.good_tensors(config)
        save_file(tensors, tmp_path / "draft.safetensors")
        report = small.rpc(
            llm, "spec_install_file", str(tmp_path / "draft.safetensors"), 1, digest(tensors), list(tensors)
        )
        assert report["installed"], report
        assert small.greedy(llm) == reference and acceptance_length(llm) > 3.5
    finally:
        llm.llm_engine.engine_core.shutdown()
