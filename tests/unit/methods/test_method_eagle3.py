"""Which draft an EAGLE-3 run starts from, and whether it may be served at once."""

from __future__ import annotations

from builders.training import TARGET

from spec_plugin import SpecConfig
from spec_plugin.methods.eagle3 import Eagle3Method


def test_law_7_a_newborn_draft_waits_until_it_was_trained():
    method = Eagle3Method().spec_method(SpecConfig(), TARGET)
    assert method is not None and method.newborn and not method.pretrained
    assert method.harvest == method.draft.config.aux_layers == (2, 4, 5)


def test_another_methods_run_is_left_to_it():
    assert Eagle3Method().spec_method(SpecConfig(method="ngram"), TARGET) is None
