"""Law 5 with two tensor parallel ranks: the draft is sharded, checked on every rank, and installed on both or on none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from safetensors.torch import save_file
from test_refresh import acceptance_length

from draft_training import digest

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def pair(target: Path, draft: Path) -> Iterator[Any]:
    """An engine of two ranks, in processes of their own."""
    llm = small.start_engine(
        target,
        draft,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        worker_extension_cls="tensor_parallel.OneRankFails",
    )
    yield llm
    llm.llm_engine.engine_core.shutdown()


def on_both(llm: Any, method: str, *args: Any, **kwargs: Any) -> list[Any]:
    return list(llm.collective_rpc(method, args=args, kwargs=kwargs))


def install(llm: Any, folder: Path, tensors: dict[str, torch.Tensor], **options: Any) -> list[dict[str, Any]]:
    """As ``EngineFront`` does: one file that the first rank's node can read."""
    version = on_both(llm, "spec_draft_info")[0]["draft_version"] + 1
    save_file(tensors, folder / "draft.safetensors")
    sent = {
        "path": str(folder / "draft.safetensors"),
        "version": version,
        "digest": digest(tensors),
        "names": list(tensors),
    }
    return on_both(llm, "spec_install_file", **sent, **options)


def served(llm: Any) -> list[Any]:
    return [
        *((i["draft_version"], i["digest"]) for i in on_both(llm, "spec_draft_info")),
        *on_both(llm, "spec_live_digest"),
    ]


def test_a_sharded_draft_is_refreshed_and_drafts(pair, config, tmp_path, greedy_reference):
    assert small.greedy(pair) == greedy_reference
    tensors = small.good_tensors(config)
    reports = install(pair, tmp_path, tensors)
    assert [r["installed"] for r in reports] == [True, True], reports
    assert [a["draft"] for a in on_both(pair, "spec_audit")] == [digest(tensors)] * 2
    assert small.greedy(pair) == greedy_reference
    assert acceptance_length(pair) > 3.5


@pytest.mark.parametrize("fault", ["check", "load", "read-back"])
def test_law_5_a_fault_on_one_rank_leaves_the_old_draft_on_both(pair, config, tmp_path, fault):
    before = served(pair)
    on_both(pair, "spec_break", fault)
    reports = install(pair, tmp_path, small.draft_tensors(config, seed=5))
    on_both(pair, "spec_repair")
    assert [r["installed"] for r in reports] == [False, False]
    assert served(pair) == before and not any(on_both(pair, "spec_lost_draft"))
    assert all(r["reason"] for r in reports)


def test_a_rank_on_another_node_gets_the_draft_from_the_first(pair, config, tmp_path):
    on_both(pair, "spec_break", "another node")
    reports = install(pair, tmp_path, small.draft_tensors(config, seed=6))
    on_both(pair, "spec_repair")
    assert [r["installed"] for r in reports] == [True, True], reports
    missing = on_both(pair, "spec_install_file", str(tmp_path / "gone"), 99, "", ["fc.weight"])
    assert not any(r["installed"] for r in missing) and all("gone" in r["reason"] for r in missing)


@pytest.mark.parametrize("keep", [True, False])
def test_law_5_another_engines_refusal_takes_the_draft_back(pair, config, tmp_path, keep):
    before = served(pair)
    assert all(r["installed"] for r in install(pair, tmp_path, small.draft_tensors(config, seed=8), hold=True))
    after = served(pair)
    on_both(pair, "spec_settle", keep)
    assert served(pair) == (after if keep else before) and after != before
    on_both(pair, "spec_settle", False)  # nothing is held any more
    assert served(pair) == (after if keep else before)
