from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from spec_plugin.config import SpecConfig
from spec_plugin.conformance.tiny import tiny_config
from spec_plugin.engine.front import EngineFront
from spec_plugin.events import Schedule, TargetInfo
from spec_plugin.manager import create_manager
from spec_plugin.session import SpecSession


@pytest.fixture
def front(tmp_path, monkeypatch) -> EngineFront:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    target = TargetInfo(path="", hf_config=tiny_config().to_dict(), dtype="float32", max_num_seqs=8)
    return EngineFront(SpecSession(SpecConfig(), target, create_manager((), (), load_entry_points=False)), None)


@pytest.mark.parametrize(("given", "expected"), [({}, 20), ({"max_logprobs": 1}, 20), ({"max_logprobs": 50}, 50)])
def test_the_self_test_can_ask_for_the_log_probs_that_tell_a_tie(front, given, expected):
    """OpenRLHF with importance sampling correction allows a single one."""
    assert front.engine_arguments(given, "some.Extension")["max_logprobs"] == expected


def test_all_log_probs_stay_all(front):
    assert front.engine_arguments({"max_logprobs": -1}, "some.Extension")["max_logprobs"] == -1


def test_nobody_is_in_the_control_group_while_nothing_is_drafted(front):
    front._group._share = 1.0
    assert front.control() is None
    front._schedule = Schedule((3,) * 9)
    assert front.control() is not None
