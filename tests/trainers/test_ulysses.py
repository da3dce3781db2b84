"""Harvest behind verl's Ulysses sequence parallelism: whole documents, from slices of packed rows, on two real ranks."""

from __future__ import annotations

import pytest
from rank_scripts import results
from spec_plugin_conformance import tiny

pytestmark = pytest.mark.trainer
SECONDS, LENGTHS = 300, (9, 14, 6, 20)  # of the script


def test_each_rank_harvests_its_documents_as_a_plain_forward_would(tmp_path):
    policy = tiny.make_target(tmp_path / "policy", num_key_value_heads=2)
    (ranks,) = results("ulysses.py", policy, tmp_path, seconds=SECONDS)
    for rank, found in enumerate(ranks):
        assert found["lengths"] == list(LENGTHS[rank::2])
        assert found["failed"] is None
        assert max(found["aux"], found["last"]) < 1e-4 and found["logprob"] < 1e-4, found
