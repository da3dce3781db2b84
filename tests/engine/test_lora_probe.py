"""What ``spec-plugin check`` reads off the sources of verl and vLLM is what they hold when they are imported."""

from __future__ import annotations

import pytest
from spec_plugin_verl_check.options import missing_for_adapters

pytestmark = pytest.mark.engine


def test_lora_adapters_are_said_to_be_broken_exactly_where_vllm_lacks_what_verl_calls() -> None:
    from vllm.model_executor.models.utils import WeightsMapper

    assert bool(missing_for_adapters()) is not hasattr(WeightsMapper, "get_unstacked_mapper")
