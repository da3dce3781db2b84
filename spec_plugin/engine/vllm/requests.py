"""vLLM's request options and answers as plain data, and the other way round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind


def options_of(sampling: Mapping[str, Any] | SamplingParams) -> dict[str, Any]:
    """A request's sampling options by vLLM's names; of ``SamplingParams`` those that are not at their default."""
    if isinstance(sampling, SamplingParams):
        default = SamplingParams()
        names = [name for name in sampling.__struct_fields__ if not name.startswith("_")]
        return {n: v for n in names if (v := getattr(sampling, n)) != getattr(default, n)}
    return dict(sampling)


def stated_log_probs(answer: Any) -> list[float]:
    """Of vLLM's ``CompletionOutput`` the log-prob of each sampled token; empty where it has none."""
    said = answer.logprobs or ()
    if isinstance(said, FlatLogprobs):  # of each place the sampled token's come first
        return [said.logprobs[first] for first in said.start_indices]
    return [of[token].logprob for of, token in zip(said, answer.token_ids, strict=False)]


def of_length(tokens: int, as_it_grows: bool, options: Mapping[str, Any]) -> SamplingParams:
    """Options of a request of exactly ``tokens`` tokens, answered once or, ``as_it_grows``, with all so far behind each step.

    What ``options`` say of a request's length and of how it is answered counts for nothing here.
    """
    kind = RequestOutputKind.CUMULATIVE if as_it_grows else RequestOutputKind.FINAL_ONLY
    own = {"max_tokens": tokens, "ignore_eos": True, "detokenize": False, "output_kind": kind}
    return SamplingParams(**{**options, **own})
