"""The n-gram method, before any engine starts."""

from __future__ import annotations

import pytest

from spec_plugin import SpecConfig, SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.engine.lossless import check_speculative_config
from spec_plugin.lifecycle.manager import built_in_method

TARGET = TargetInfo(path="/nowhere", hf_config={"model_type": "anything"}, dtype="float32", max_num_seqs=8)


def test_it_trains_and_harvests_nothing_and_takes_any_target() -> None:
    method = built_in_method(SpecConfig.parse({"method": "ngram", "k": 3}), TARGET)
    assert method is not None
    assert method.draft is None and method.harvest is None
    assert method.pretrained and method.variable_length
    settings = method.speculative_config()
    assert "model" not in settings
    check_speculative_config(settings)


@pytest.mark.parametrize("option", [{"draft": "/a"}, {"draft_vocab_size": 64}, {"aux_layers": (1, 2, 3)}])
def test_options_of_a_draft_are_refused_by_name(option: dict[str, object]) -> None:
    with pytest.raises(SpecConfigError, match=rf"spec\.{next(iter(option))}="):
        built_in_method(SpecConfig.parse({"method": "ngram", **option}), TARGET)
