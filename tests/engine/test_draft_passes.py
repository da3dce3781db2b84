"""What a step costs of the draft, by the k that the table says: k passes, and none while it is paused.

V2 of vLLM 0.29 itself runs ``spec.k`` of them (``repairs/draft_passes.py``); vLLM 0.32 hands k on to the draft.
"""

from __future__ import annotations

from typing import Any

import pytest
import small
from method_engines import K, engine_with, method_of, set_k

from draft_training.eagle3 import save_draft

pytestmark = pytest.mark.engine


def count_passes(worker: Any) -> None:
    """Count the forward passes of target and draft in a worker."""
    worker.passes = {"target": 0, "draft": 0}

    def counting(name: str) -> Any:
        def count(*_: Any) -> None:
            worker.passes[name] += 1

        return count

    worker.model_runner.get_model().register_forward_pre_hook(counting("target"))
    worker.get_draft_model().register_forward_pre_hook(counting("draft"))


def take_passes(worker: Any) -> float:
    """Of the draft for each of the target's, since the last call."""
    passes, worker.passes = worker.passes, dict.fromkeys(worker.passes, 0)
    return float(passes["draft"] / passes["target"])


def test_passes_of_the_draft_by_k(target, config, greedy_reference, tmp_path):
    save_draft(tmp_path, config, small.good_tensors(config))
    llm = engine_with(target, method_of(target, method="eagle3", draft=str(tmp_path)))
    small.rpc(llm, count_passes)
    found: dict[int, float] = {}
    for k in (K, 2, 1, 0):
        set_k(llm, k)
        assert small.greedy(llm) == greedy_reference
        found[k] = small.rpc(llm, take_passes)
        print(f"k={k}: {found[k]:.2f} passes of the draft a step")
    assert found == {k: k for k in found}, "none while the draft is paused"
