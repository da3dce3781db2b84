"""Targets with recurrent states: told by vLLM's class, never drafted for now and then."""

from __future__ import annotations

import pytest

from spec_plugin.engine.states import check_states, for_states, turned_off
from spec_plugin.engine_class import keeps_states
from spec_plugin.errors import SpecConfigError
from spec_plugin.events import Schedule

HYBRID = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
DENSE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


def test_states_are_told_by_the_class_and_by_the_layers() -> None:
    assert keeps_states(HYBRID) and not keeps_states(DENSE)
    assert not keeps_states(HYBRID | {"layer_types": ["full_attention", "full_attention"]})
    assert keeps_states(HYBRID | {"layer_types": ["linear_attention", "full_attention"]})


def test_what_corrupts_states_is_turned_off_also_where_the_trainer_says_nothing() -> None:
    off = {"enable_prefix_caching": False, "async_scheduling": False}
    assert turned_off({}) == turned_off({"enable_prefix_caching": True}) == off


def test_states_are_refused_unless_they_are_to_be_tried() -> None:
    check_states(DENSE, False, "eagle3", tried=False)
    check_states(HYBRID, False, "eagle3", tried=True)
    with pytest.raises(SpecConfigError, match=r"recurrent states.*set spec.recurrent_states=try"):
        check_states(HYBRID, False, "eagle3", tried=False)


def test_methods_that_draft_now_and_then_are_refused_for_states_alone() -> None:
    check_states(DENSE, True, "suffix", tried=False)
    with pytest.raises(
        SpecConfigError, match=r"suffix.*recurrent states.*set spec.method to one that drafts at every step"
    ):
        check_states(HYBRID, True, "suffix", tried=True)


@pytest.mark.parametrize(
    ("table", "current", "in_flight", "k"),
    [
        ((0, 3, 3, 2), 0, False, 2),  # one k, the smallest: nobody is slower than plain
        ((0, 3, 3, 0), 3, False, 0),
        ((0, 0, 0, 0), 3, True, 3),  # requests have drafted with 3: none of them may get less
        ((0, 3, 3, 3), 1, True, 3),  # more is no harm
    ],
)
def test_all_batch_sizes_draft_alike_and_never_less_in_flight(table, current, in_flight, k) -> None:  # type: ignore[no-untyped-def]
    found = for_states(Schedule(table, (1.0,) * len(table)), current, in_flight)
    assert found == Schedule((k,) * len(table)), "and no guard, which would drop drafts in the middle of a phase"
