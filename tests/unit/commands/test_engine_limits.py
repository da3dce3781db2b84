"""What vLLM refuses by config.json and options alone stands in ``check``, with both numbers, and is what vLLM itself refuses."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from draft_training.rope import Rope, derived_length
from spec_plugin.commands.engine_limits import ALLOW_LONG, engine_limits, splits
from spec_plugin.config import SpecConfig
from spec_plugin.events import TargetInfo
from spec_plugin.refusals import OURS
from spec_plugin.run_plan import Model, RunFacts

HF = {
    "model_type": "qwen3",
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}


def run(hf: dict[str, Any], ranks: int = 1, length: int | None = None, **options: Any) -> RunFacts:
    target = TargetInfo("m", hf, "bfloat16", tensor_parallel=ranks, max_model_len=length, engine_options=options)
    return RunFacts(SpecConfig.parse(None), target, Model("m", hf, "a test"), "path", "", (), True, "", "the.tp")


def said(facts: RunFacts, method: Any = None) -> list[str]:
    return [str(objection) for objection in engine_limits(facts, method)]


@pytest.mark.parametrize(
    ("change", "ranks", "numbers"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, 2, ["3 attention heads", "3 key-value heads"]),
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, 4, ["6 attention heads", "6 key-value heads"]),
        ({"num_attention_heads": 3, "num_key_value_heads": 3, "vocab_size": 768}, 6, ["3 attention heads"]),
        ({"num_key_value_heads": 3}, 4, ["3 key-value heads"]),
        ({"intermediate_size": 190}, 4, ["190 features of the MLP"]),
        ({"vocab_size": 512}, 3, ["4 key-value heads", "512 tokens of the vocabulary"]),
        ({"num_experts": 8, "moe_intermediate_size": 30, "intermediate_size": 5}, 4, ["30 features of an expert"]),
    ],
)
def test_what_does_not_divide_is_refused_with_both_numbers(
    change: dict[str, Any], ranks: int, numbers: list[str]
) -> None:
    lines = said(run({**HF, **change}, ranks))
    assert all(line.partition("set it to ")[2] for line in lines)
    assert len(lines) == len(numbers), lines
    for line, number in zip(lines, numbers, strict=True):
        assert (
            f"policy's {number} (" in line
            and f"to {ranks} tensor parallel ranks" in line
            and f"(the.tp={ranks})" in line
        )


@pytest.mark.parametrize(
    ("change", "ranks"),
    [
        ({}, 1),
        ({}, 2),
        ({"num_attention_heads": 3}, 1),
        ({"num_attention_heads": 16, "num_key_value_heads": 2}, 8),  # each key-value head is on four ranks
        ({"vocab_size": 501}, 2),  # vLLM fills it up
        ({"num_key_value_heads": 3, "kv_lora_rank": 8}, 4),  # MLA
        ({"num_key_value_heads": [1, 2], "num_attention_heads": None}, 4),  # not a number: nothing is known
    ],
)
def test_what_vllm_takes_is_taken(change: dict[str, Any], ranks: int) -> None:
    assert said(run({**HF, **change}, ranks)) == []


def test_what_to_set_are_the_sizes_that_all_of_the_numbers_allow() -> None:
    (line,) = said(run({**HF, "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": 768}, 8))[:1]
    assert line.endswith("set it to one of 1, 2, 3, 4, 6"), line


def test_a_draft_of_another_shape_is_asked_too_unless_it_runs_on_one_rank() -> None:
    shape = SimpleNamespace(to_hf=lambda: {**HF, "num_attention_heads": 3, "num_key_value_heads": 3})
    method: Any = SimpleNamespace(draft_config=shape.to_hf(), settings={})
    first, second = said(run(HF, 2), method)
    assert "the draft's 3 attention heads" in first and "the draft's 3 key-value heads" in second
    assert [o.by for o in engine_limits(run(HF, 2), method)] == [OURS] * 2  # without the flag the run would start
    method.settings["draft_tensor_parallel_size"] = 1
    assert said(run(HF, 2), method) == []


def test_sequences_longer_than_the_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = said(run(HF, length=513))
    assert "sequences of 513 tokens" in line and "512 (max_position_embeddings)" in line
    assert said(run(HF, length=512)) == [] == said(run(HF))
    monkeypatch.setenv(ALLOW_LONG, "1")
    assert said(run(HF, length=513)) == []


ROPES: list[tuple[Any, int]] = [
    (None, 512),
    ({"rope_type": "default", "rope_theta": 1e4}, 512),
    ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, 1024),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 1e4}, 1024),
    (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 1e4,
        },
        512,
    ),
    ({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, 2048),
]


def test_a_field_that_vllm_prefers_bounds_a_text() -> None:
    assert derived_length({**HF, "model_max_length": 2048}) == ("model_max_length", 2048)
    assert derived_length({**HF, "max_seq_len": 300}) == ("max_seq_len", 300)


def test_of_two_ropes_the_older_name_counts() -> None:
    """As in transformers 5, which takes ``rope_scaling`` in place of ``rope_parameters``, theta and all."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    both = {**HF, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": rope}
    assert derived_length(both) == ("max_position_embeddings", 1024)
    read = Rope.from_hf(both)
    assert (read.type, read.factor, read.theta) == ("yarn", 4.0, 1e4)
    assert Rope.from_hf({**both, "rope_theta": 5e5}).theta == 5e5


@pytest.mark.parametrize(("rope", "most"), ROPES)
def test_the_longest_sequence_follows_the_rotary_scaling(rope: Any, most: int) -> None:
    assert derived_length({**HF, "rope_parameters": rope}) == ("max_position_embeddings", most)


@pytest.mark.parametrize("bad", [10**400, float("inf"), float("nan"), -1, "4"])
def test_numbers_that_are_none_bound_nothing(bad: Any) -> None:
    assert derived_length({**HF, "max_position_embeddings": bad}) is None
    assert derived_length({**HF, "rope_scaling": {"type": "linear", "factor": bad}}) is None
    assert (
        derived_length({**HF, "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": bad}})
        is None
    )


def test_a_step_of_fewer_tokens_than_requests_is_refused() -> None:
    (line,) = said(run(HF, max_num_batched_tokens=64, max_num_seqs=128))
    assert "64 tokens at most" in line and "128 requests" in line
    assert said(run(HF, max_num_batched_tokens=128, max_num_seqs=128)) == []


def test_a_config_that_is_overridden_is_not_judged() -> None:
    facts = run({**HF, "num_attention_heads": 3}, 2)
    facts = replace(facts, target=replace(facts.target, engine_options={"hf_overrides": {"num_attention_heads": 4}}))
    assert said(facts) == []


# against vLLM's own classes


def vllm_model_config(**change: Any) -> Any:
    pytest.importorskip("vllm.config.model")  # before the next, which imports it
    from transformers import Qwen3Config
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    config = Qwen3Config(
        **{**HF, "architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "num_hidden_layers": 1, **change}
    )
    return config, ModelArchConfigConvertorBase(config, config).convert()


@pytest.mark.parametrize("heads", [3, 4, 6, 12])
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_vllm_refuses_the_same_numbers_of_heads(heads: int, ranks: int) -> None:
    _, arch = vllm_model_config(num_attention_heads=heads, num_key_value_heads=heads)
    from vllm.config.model import ModelConfig

    model = SimpleNamespace(model_arch_config=arch, multimodal_config=None)
    parallel = SimpleNamespace(
        tensor_parallel_size=ranks,
        enable_expert_parallel=False,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
    )
    ours = next(split for split in splits({**HF, "num_attention_heads": heads}) if split.what == "attention heads")
    try:
        ModelConfig.verify_with_parallel_config(model, parallel)  # type: ignore[arg-type]
        takes = True
    except ValueError as error:
        assert "attention heads" in str(error)
        takes = False
    assert takes == ours.fits(ranks)


@pytest.mark.parametrize(("rope", "most"), ROPES)
def test_vllm_refuses_the_same_lengths(rope: Any, most: int) -> None:
    config, arch = vllm_model_config(rope_parameters=rope) if rope else vllm_model_config()
    from vllm.config.model import _get_and_verify_max_len

    def asked(length: int) -> int:
        return _get_and_verify_max_len(config, arch, None, length, False, None)

    assert asked(most) == most
    with pytest.raises(ValueError, match="max_model_len"):
        asked(most + 1)


def test_vllm_refuses_the_same_budget() -> None:
    pytest.importorskip("vllm")
    from vllm.config.scheduler import SchedulerConfig

    kept = {"max_model_len": 64, "is_encoder_decoder": False}
    SchedulerConfig(max_num_batched_tokens=128, max_num_seqs=128, **kept)
    with pytest.raises(ValueError, match="max_num_seqs"):
        SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=128, **kept)
