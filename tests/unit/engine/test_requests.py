"""vLLM's request options as the self-test makes them."""

from __future__ import annotations

import pytest
from vllm.sampling_params import RequestOutputKind

from spec_plugin.engine.lossless import check_sampling
from spec_plugin.engine.vllm.requests import of_length


@pytest.mark.parametrize("as_it_grows", [False, True])
def test_what_a_run_says_of_its_answers_does_not_reach_the_self_test(as_it_grows: bool) -> None:
    """The allow-list takes these options, whatever they are, and a run that has them is tested like any other."""
    run = {"temperature": 0.7, "output_kind": RequestOutputKind.DELTA, "max_tokens": 3, "detokenize": True}
    check_sampling(run)
    params = of_length(16, as_it_grows, run)
    assert (params.max_tokens, params.temperature, params.ignore_eos, params.detokenize) == (16, 0.7, True, False)
    assert params.output_kind is (RequestOutputKind.CUMULATIVE if as_it_grows else RequestOutputKind.FINAL_ONLY)
