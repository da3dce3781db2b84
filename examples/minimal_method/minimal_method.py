"""A drafting method of your own, from a package of your own: one hook.

This one looks up long repetitions only: vLLM's n-gram proposer, told to match the last eight tokens or more. Whatever a
method proposes, samples and log-probs are the policy's, so the worst that it can be is slow, and then the controller
leaves it out.
"""

from __future__ import annotations

from spec_plugin import SpecConfig, SpecConfigError, hookimpl
from spec_plugin.api.events import TargetInfo
from spec_plugin.api.method import Method

NAME = "repeats"


@hookimpl
def spec_method(config: SpecConfig, target: TargetInfo) -> Method | None:
    """How to draft, if the user has asked for us by ``spec.method=repeats``."""
    if config.method != NAME:
        return None
    if config.draft is not None:
        raise SpecConfigError(f"spec.draft={config.draft!r}: the method {NAME} has no draft model; leave it out")
    return Method(
        name=NAME,
        settings={  # vLLM's speculative_config; see spec_plugin.engine.lossless for what is allowed
            "method": "ngram",
            "prompt_lookup_min": 8,
            "prompt_lookup_max": 16,
            "num_speculative_tokens": config.k,
            # k changes while the engine runs; this is what it starts with
            "num_speculative_tokens_per_batch_size": [(1, target.max_num_seqs, config.k)],
            "rejection_sample_method": "standard",
        },
        pretrained=True,  # may be served before anything was trained
        variable_length=True,  # proposes another number of tokens for each request, often none
    )
