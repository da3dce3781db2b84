"""Law 5 with two tensor parallel ranks: the draft is sharded, checked on every rank, and installed on both or on none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from refreshing import acceptance_length
from safetensors.torch import load_file, save_file

from draft_training import DraftConfig, digest
from draft_training.eagle3 import save_draft
from draft_training.layouts import t2d_from_d2t

pytestmark = pytest.mark.engine


KEPT = 201  # of 320 tokens; the head is padded to 256 rows, so the second rank holds fewer real ones than the first


def start_pair(target: Path, draft: Path) -> Any:
    """An engine of two ranks, in processes of their own."""
    return small.start_engine(
        target,
        draft,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        worker_extension_cls="tensor_parallel.OneRankFails",
    )


@pytest.fixture(scope="module")
def pair(target: Path, draft: Path) -> Iterator[Any]:
    """With the draft's full vocabulary, and as many key-value heads as ranks."""
    llm = start_pair(target, draft)
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


def pruned_tensors(config: DraftConfig, target: Path, kept: list[int], seed: int | None = None) -> dict[str, Any]:
    """The draft that knows the target, but proposes only these tokens; random weights with a seed."""
    full = replace(config, draft_vocab_size=config.vocab_size)
    tensors = small.good_tensors(full) if seed is None else small.draft_tensors(full, seed)
    ids = torch.tensor(sorted(kept))
    d2t = ids - torch.arange(len(ids))
    head = load_file(target / "model.safetensors")["lm_head.weight"][ids]
    return tensors | {"lm_head.weight": head, "d2t": d2t, "t2d": t2d_from_d2t(d2t, config.vocab_size)}


@pytest.fixture(scope="module")
def pruned(target: Path, config: DraftConfig, greedy_reference: list[list[int]]) -> tuple[DraftConfig, list[int]]:
    """One key-value head for two ranks, and a vocabulary of which greedy outputs need no other token."""
    said = {token for output in greedy_reference for token in output}
    others = [token for token in range(config.vocab_size) if token not in said]
    assert len(said) <= KEPT
    return replace(config, draft_vocab_size=KEPT, num_kv_heads=1), [*said, *others[: KEPT - len(said)]]


@pytest.fixture(scope="module")
def pruned_pair(target: Path, pruned: tuple[DraftConfig, list[int]], tmp_path_factory: Any) -> Iterator[Any]:
    config, kept = pruned
    folder = tmp_path_factory.mktemp("pruned") / "draft"
    save_draft(folder, config, pruned_tensors(config, target, kept, seed=1))
    llm = start_pair(target, folder)
    yield llm
    llm.llm_engine.engine_core.shutdown()


def test_a_pruned_vocabulary_and_replicated_key_value_heads_are_refreshed_and_draft(
    pruned_pair, pruned, target, tmp_path, greedy_reference
):
    config, kept = pruned
    for info in on_both(pruned_pair, "spec_draft_info"):  # of the whole tensors, on either rank
        required = {n: tuple(s) for n, (s, _) in info["expected"].items() if n not in info["optional"]}
        assert required == {n: s for n, s in small.expected_shapes(config).items() if n != "t2d"}
        assert info["problem"] is None and info["shared"] == {"embed_tokens.weight": "model.embed_tokens.weight"}
    assert small.greedy(pruned_pair) == greedy_reference and acceptance_length(pruned_pair) < 1.5
    tensors = pruned_tensors(config, target, kept)
    reports = install(pruned_pair, tmp_path, tensors)
    assert [r["installed"] for r in reports] == [True, True], reports
    assert [a["draft"] for a in on_both(pruned_pair, "spec_audit")] == [digest(tensors)] * 2
    assert small.greedy(pruned_pair) == greedy_reference and acceptance_length(pruned_pair) > 3.5


def test_a_refresh_may_bring_another_pruned_vocabulary(pruned_pair, pruned, target, tmp_path, greedy_reference):
    """Which drafted number means which token is refreshed too: a stale table would propose others than the head means."""
    config, kept = pruned
    others = sorted(set(range(config.vocab_size)) - set(kept))
    half = sorted(kept)[::2]
    half += others[: KEPT - len(half)]
    reports = install(pruned_pair, tmp_path, pruned_tensors(config, target, half))
    assert [r["installed"] for r in reports] == [True, True], reports
    assert small.greedy(pruned_pair) == greedy_reference
    assert acceptance_length(pruned_pair) > 1.5  # what it kept it still proposes rightly


@pytest.mark.parametrize("fault", ["check", "load", "read-back", "two to one"])
def test_law_5_a_fault_on_one_rank_leaves_the_old_pruned_draft_on_both(pruned_pair, pruned, target, tmp_path, fault):
    config, kept = pruned
    before, tensors = served(pruned_pair), pruned_tensors(config, target, kept, seed=5)
    if fault == "two to one":
        tensors["d2t"][1] = tensors["d2t"][0] - 1
    else:
        on_both(pruned_pair, "spec_break", fault)
    reports = install(pruned_pair, tmp_path, tensors)
    on_both(pruned_pair, "spec_repair")
    assert [r["installed"] for r in reports] == [False, False] and all(r["reason"] for r in reports)
    assert served(pruned_pair) == before and not any(on_both(pruned_pair, "spec_lost_draft"))
