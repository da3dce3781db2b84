"""Which engines are started so that the run can choose how its draft proposes tokens."""

from __future__ import annotations

from typing import Any

import pytest

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.events import TargetInfo
from spec_plugin.methods import sample_method
from spec_plugin.methods.sample_method import draft_sample_method, kept_logits
from spec_plugin.plan.model_runner import Runner

V1, V2 = "v1/spec_decode/llm_base_proposer.py", "v1/worker/gpu/spec_decode/speculator.py"
SOURCES = {V1: "self._enable_probabilistic_draft_probs = True", V2: "class DraftModelSpeculator:"}
#: what follows of it, as vLLM has it
MADE = {
    "0.26": """
            self.draft_logits = torch.zeros(
                self.max_num_reqs,
                self.num_speculative_steps,
                self.vocab_size,
                dtype=torch.float32,
                device=device,
            )
""",
    "0.29": """
            dtype, fill = self.draft_logits_spec(vllm_config)
            self.draft_logits = torch.full(
                (
                    self.max_num_reqs,
                    self.num_speculative_steps,
                    self.vocab_size,
                ),
                fill,
                dtype=dtype,
                device=device,
            )
        self.temperature = torch.zeros(self.max_num_reqs, dtype=torch.float32, device=device)
""",
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


@pytest.mark.parametrize(
    ("release", "dtype", "gib", "method_of_1024"),
    [
        ("0.26", "bfloat16", 4.6, "greedy"),
        ("0.29", "bfloat16", 2.3, "probabilistic"),
        ("0.29", "float32", 4.6, "greedy"),
    ],
)
def test_the_memory_is_that_of_the_dtype_in_which_the_installed_vllm_keeps_them(
    runner, monkeypatch, release, dtype, gib, method_of_1024
):
    runner["v2"] = True
    monkeypatch.setitem(SOURCES, V2, SOURCES[V2] + MADE[release])
    config = SpecConfig.parse({"k": 8})
    target = TargetInfo("", hf_config={"vocab_size": 151_936}, dtype=dtype, max_num_seqs=1024)
    assert kept_logits(config, target) / 2**30 == pytest.approx(gib, abs=0.05)
    assert method({"k": 8}, dtype=dtype, max_num_seqs=1024) == method_of_1024
