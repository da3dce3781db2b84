"""What vLLM is told of every method alike: how much to draft, and by which exact rule to accept."""

from __future__ import annotations

from typing import Any

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.plan.engine_class import keeps_states
from spec_plugin.plan.sources import source_of

_KEEPS = "disable_eagle_block_drop"


def common_settings(config: SpecConfig, target: TargetInfo, all_or_nothing_k: bool = False) -> dict[str, Any]:
    """The part of vLLM's ``speculative_config`` that is the same for all; the table makes k changeable while it runs.

    Args:
        config: the options.
        target: the engine's.
        all_or_nothing_k: only 0 and ``spec.k`` can be drafted.
    """
    table = [(1, target.max_num_seqs, config.k)] if all_or_nothing_k else every_k(target.max_num_seqs, config.k)
    return {
        "num_speculative_tokens": config.k,
        "num_speculative_tokens_per_batch_size": table,
        "rejection_sample_method": "standard",
        **({} if keeps_states(target.hf_config) else whole_hits()),  # those have no prefix cache here
    }


def whole_hits() -> dict[str, bool]:
    """Where the installed vLLM can (0.31, 0.32): leave no block of a hit in the prefix cache out for the draft's sake.

    The last entry of the draft's own cache in that block may have been made with the token that follows in another request. In
    samples of one prompt, and in the turns of a conversation, that is the same token, and elsewhere it is one entry of the draft.
    """
    return {_KEEPS: True} if f"    {_KEEPS}: bool" in source_of("vllm", "config/speculative.py") else {}


def refuse_options_of_a_draft(config: SpecConfig) -> None:
    """For a method without one: options that say something of a draft model, or of the shape of a new one.

    Raises:
        SpecConfigError: naming the first that is set.
    """
    if config.draft is not None:
        raise SpecConfigError(
            f"spec.draft={config.draft!r}: the method {config.method} has no draft model; leave it out"
        )
    refuse_options_of_a_shape(config, f"the method {config.method}, which has no draft model")


def refuse_options_of_a_shape(config: SpecConfig, who: str) -> None:
    """For a method whose drafts have a shape of their own.

    Raises:
        SpecConfigError: naming the first that is set.
    """
    for name in ("draft_vocab_size", "aux_layers"):
        if (value := getattr(config, name)) is not None:
            raise SpecConfigError(f"spec.{name}={value!r} has no meaning for {who}; leave it out")


def every_k(largest: int, k: int) -> list[tuple[int, int, int]]:
    """vLLM's (from, to, k) for batch sizes, naming each k once: its V2 model runner captures graphs for these only.

    What it says holds until the first schedule is set, which is before the first rollout.
    """
    smaller = min(k, largest - 1)  # so many batch sizes get one of their own, down to k = 0 for the largest
    single = [(largest - i, largest - i, i) for i in range(smaller)]
    return [(1, largest - smaller, k), *reversed(single)]
