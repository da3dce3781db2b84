"""Harvest, log-probs and export of verl's Megatron actors in each layout, on real ranks, against transformers."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
from rank_scripts import results
from spec_plugin_conformance import tiny

pytestmark = [
    pytest.mark.trainer,
    pytest.mark.skipif(not find_spec("megatron"), reason="needs megatron-core: make env TRAINER=megatron"),
]
SECONDS = 1200
LENGTHS = (13, 24, 7, 30, 18, 21)  # of the script
LAYOUTS = {
    f"{split} {kind}": ranks
    for split, ranks in {"one": 1, "tp2": 2, "pp2": 2, "cp2": 2}.items()
    for kind in ("padded", "packed")
} | {"moe one": 1, "moe tp2": 2, "moe ep2": 2}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank of each layout has found."""
    root = tmp_path_factory.mktemp("megatron")
    for family in ("qwen3", "qwen3_moe"):
        tiny.make_target(root / family, family=family, num_key_value_heads=2)
    return dict(results("megatron_layouts.py", root, root, seconds=SECONDS))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_harvests_its_documents_as_a_plain_forward_would(found, layout):
    ranks = LAYOUTS[layout]
    assert len(found[layout]) == ranks
    for rank, of_rank in enumerate(found[layout]):
        assert of_rank["failed"] is None
        share = 1 if layout.endswith("ep2") else ranks  # ranks that run a batch together
        assert of_rank["lengths"] == list(LENGTHS[rank % share :: share])
        assert of_rank["mask"], "responses are where they are"
        assert max(of_rank["aux"], of_rank["last"]) < 1e-4, of_rank


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_knows_the_log_probs_whichever_stage_computed_them(found, layout):
    assert all(of_rank["logprob"] < 1e-5 for of_rank in found[layout]), found[layout]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_weights_that_leave_are_the_checkpoints_on_every_rank(found, layout):
    assert all(of_rank["exported"] for of_rank in found[layout])


def test_law_6_a_stage_that_cannot_harvest_switches_off_on_every_stage_and_the_pass_goes_on(found):
    first, last = found["pp2 faulty"]
    assert "planted" in first["failed"] and "stages captured different documents" in last["failed"]
    assert first["packs"] == last["packs"] == 0
    assert first["sequences"] == last["sequences"] == len(LENGTHS)


def test_documents_are_put_together_where_the_states_are_and_in_the_layout_that_verl_has_split_them_by(found):
    """verl moves a batch to the card in its own step: masks of it are gathered over ranks, which NCCL does on a card alone."""
    padded, packed = found["places"]
    assert padded["device"] == packed["device"] == "meta"
    assert packed["cp_layout"] == packed["behind"]["cp_layout"] == "contiguous"
