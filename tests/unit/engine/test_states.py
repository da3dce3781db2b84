"""Targets with recurrent states: told by vLLM's class, never drafted for now and then."""

from __future__ import annotations

import pytest

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import SpecConfigError
from spec_plugin.api.events import Schedule, TargetInfo
from spec_plugin.engine.recurrent_states import check_states, for_states, turned_off
from spec_plugin.lifecycle.manager import create_manager, method_of
from spec_plugin.plan.engine_class import keeps_states

HYBRID = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
DENSE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def test_states_are_told_by_the_class_and_by_the_layers() -> None:
    assert keeps_states(HYBRID) and not keeps_states(DENSE)
    assert not keeps_states(HYBRID | {"layer_types": ["full_attention", "full_attention"]})
    assert keeps_states(HYBRID | {"layer_types": ["linear_attention", "full_attention"]})


def test_what_corrupts_states_is_turned_off_also_where_the_trainer_says_nothing() -> None:
    off = {"enable_prefix_caching": False, "async_scheduling": False}
    assert turned_off({}) == turned_off({"enable_prefix_caching": True}) == off


def test_methods_that_draft_now_and_then_are_refused_for_states_alone() -> None:
    check_states(DENSE, True, "suffix")
    check_states(HYBRID, False, "eagle3")
    with pytest.raises(
        SpecConfigError, match=r"suffix.*recurrent states.*set spec.method to one that drafts at every step"
    ):
        check_states(HYBRID, True, "suffix")


@pytest.mark.parametrize(
    ("table", "current", "in_flight", "k"),
    [
        ((0, 3, 3, 3), 0, False, 3),
        ((0, 3, 3, 2), 3, False, 0),  # k tokens or none, and no batch size is slower than plain
        ((0, 3, 3, 0), 3, False, 0),
        ((0, 0, 0, 0), 3, True, 3),  # requests have drafted: none of them may go on without
        ((0, 0, 0, 0), 0, True, 0),
        ((0, 3, 3, 3), 0, True, 3),  # more is no harm
    ],
)
def test_all_batch_sizes_draft_k_or_nothing_and_not_nothing_in_flight(table, current, in_flight, k) -> None:  # type: ignore[no-untyped-def]
    found = for_states(Schedule(table, (1.0,) * len(table)), 3, current, in_flight)
    assert found == Schedule((k,) * len(table)), "and no guard, which would drop drafts in the middle of a phase"


def test_a_method_drafts_all_or_nothing_for_a_target_with_states() -> None:
    for hf, whole in ((HYBRID, True), (DENSE, False)):
        hf = hf | {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 2}
        target = TargetInfo(
            "policy", hf | {"head_dim": 32, "intermediate_size": 128, "max_position_embeddings": 512}, "bfloat16"
        )
        config = SpecConfig.parse(None)
        assert method_of(config, target, create_manager((), ())).all_or_nothing_k == whole
