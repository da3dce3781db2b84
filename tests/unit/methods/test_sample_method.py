"""Which engines are started so that the run can choose how its draft proposes tokens."""

from __future__ import annotations

from typing import Any

import pytest

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.events import TargetInfo
from spec_plugin.methods import sample_method
from spec_plugin.methods.sample_method import draft_sample_method
from spec_plugin.plan.model_runner import Runner

V1 = "v1/spec_decode/llm_base_proposer.py"
SOURCES = {
    V1: "self._enable_probabilistic_draft_probs = True",
    "v1/worker/gpu/spec_decode/speculator.py": "class DraftModelSpeculator:",
}


@pytest.fixture
def runner(monkeypatch):
    chosen = {"v2": False}
    monkeypatch.setattr(sample_method, "runner_of", lambda settings, device: Runner(chosen["v2"], "said so"))
    monkeypatch.setattr(sample_method, "source_of", lambda package, file: SOURCES[file])
    return chosen


def method(config: dict[str, Any] | None = None, **target: Any) -> str:
    about = {"hf_config": {"vocab_size": 151_936}, "dtype": "bfloat16", "device_type": "cuda", **target}
    return draft_sample_method(SpecConfig.parse(config or {}), TargetInfo("", **about), "eagle3")


@pytest.mark.parametrize("v2", [False, True])
def test_a_trained_draft_may_draw_where_nothing_speaks_against_it(runner, v2):
    runner["v2"] = v2
    assert method() == "probabilistic"
    assert method(device_type="cpu") == method(sampling={"top_p": 0.9}) == "probabilistic"
    assert method({"draft_sample_method": "greedy"}) == "greedy"


@pytest.mark.parametrize(
    ("config", "target"),
    [
        ({"train": False}, {}),
        ({}, {"sampling": {"temperature": 0.0}}),
    ],
)
def test_what_could_not_gain_by_it_is_greedy_unless_the_user_asks(runner, config, target):
    assert method(config, **target) == "greedy"
    assert method({**config, "draft_sample_method": "probabilistic"}, **target) == "probabilistic"


def test_a_vllm_that_cannot_draw_is_not_asked_to(runner, monkeypatch):
    monkeypatch.setattr(sample_method, "source_of", lambda package, file: "")
    assert method() == "greedy"


def test_v2_is_not_asked_for_more_memory_than_it_is_worth(runner, caplog):
    """[max_num_seqs, k, vocabulary] logits: 2.3 GiB at 1024 x 8 x 152k, which is taken; 4.6 GiB are not, in one line."""
    runner["v2"] = True
    assert method({"k": 8}, max_num_seqs=1024) == "probabilistic"
    assert not caplog.records
    assert method({"k": 16}, max_num_seqs=1024) == "greedy"
    (record,) = caplog.records
    assert "16 tokens of each of 1024 requests, 4.6 GiB" in record.getMessage()
    runner["v2"] = False
    assert method({"k": 16}, max_num_seqs=1024) == "probabilistic", "V1 keeps those of a step alone"
