"""The one patch of vLLM's suffix decoding: any k, and a tree for each prompt that outlives its requests.

==========  ==========================================================================================================
symbol      ``SuffixDecodingProposer.__init__`` and ``propose``, wrapped in the worker before it makes its model runner
reason      vLLM 0.29 asserts that each step drafts the k that the engine was started with, so a table of k ends the engine;
            and its cache keeps what was sampled without telling whose prompt it answered
versions    checked on 0.29 with arctic-inference 0.3.0 (CPU), on no other
guard       ``PatchError`` if they have lost the names that the wrappers read
==========  ==========================================================================================================
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from spec_plugin.api.errors import PatchError
from spec_plugin.engine.vllm.suffix.trees import PromptTrees


def prepare(options: Mapping[str, Any]) -> None:
    """Wrap vLLM's proposer, once in a process.

    Args:
        options: of ``PromptTrees``, for the engine that is being made; a process may make several.

    Raises:
        PatchError: if it is no longer what the wrappers read.
    """
    from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer as Proposer

    Proposer.spec_options = dict(options)
    if hasattr(Proposer.propose, "__wrapped__"):
        return
    reads = {"num_speculative_tokens", "suffix_cache", "max_tree_depth", "active_requests", "speculate"}
    if missing := reads - {*Proposer.__init__.__code__.co_names, *Proposer.propose.__code__.co_names}:
        raise PatchError(_gone(f"SuffixDecodingProposer reads no {sorted(missing)}"))
    if "num_speculative_tokens" not in inspect.signature(Proposer.propose).parameters:
        raise PatchError(_gone("SuffixDecodingProposer.propose has no argument num_speculative_tokens"))
    make, original = Proposer.__init__, Proposer.propose

    @functools.wraps(make)
    def initialise(self: Any, vllm_config: Any) -> None:
        make(self, vllm_config)
        trees = PromptTrees(self.max_tree_depth, self.num_speculative_tokens, **self.spec_options)
        self.spec_memory = self.suffix_cache = trees  # by the first name the worker extension finds what remembers

    @functools.wraps(original)
    def propose(self: Any, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> list[list[int]]:
        self.num_speculative_tokens = num_speculative_tokens
        drafts: list[list[int]] = original(self, num_speculative_tokens, *args, **kwargs)
        return drafts

    Proposer.__init__, Proposer.propose = initialise, propose


def _gone(what: str) -> str:
    return f"{what}: suffix decoding's patch does not fit this vLLM; use one of the range that spec-plugin declares"
