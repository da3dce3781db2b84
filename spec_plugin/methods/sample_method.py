"""vLLM's ``draft_sample_method`` of an engine: may the run choose, and change, how its draft proposes tokens."""

from __future__ import annotations

import logging

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.events import TargetInfo
from spec_plugin.plan.model_runner import runner_of
from spec_plugin.plan.sources import source_of

logger = logging.getLogger(__name__)

#: bytes that vLLM's V2 model runner may take at start for the logits of what was proposed
_ROOM = 4 << 30
#: where each model runner says that it can sample proposals
_CAN = {
    False: ("v1/spec_decode/llm_base_proposer.py", "_enable_probabilistic_draft_probs"),
    True: ("v1/worker/gpu/spec_decode/speculator.py", "class DraftModelSpeculator"),
}


def proposed_logits(config: SpecConfig, target: TargetInfo) -> int:
    """How many logits the proposals of a full batch are drawn from."""
    return target.max_num_seqs * config.k * (target.vocab_size or 0)


def kept_logits(config: SpecConfig, target: TargetInfo) -> int:
    """Bytes that vLLM's V2 model runner takes at its start on each card for what proposals are drawn from.

    In the engine's dtype (0.29), or in float32 whatever that is (0.26, whose memory profile counts none of them, either: they are
    there before it begins).
    """
    file, _ = _CAN[True]
    _, _, made = source_of("vllm", file).partition("self.draft_logits = torch.")
    in_float32 = "torch.float32" in made.partition(")")[0] or target.dtype == "float32"
    return (4 if in_float32 else 2) * proposed_logits(config, target)


def draft_sample_method(config: SpecConfig, target: TargetInfo, method: str) -> str:
    """What to tell vLLM: "probabilistic" leaves both open for a draft that the run trains, see ``policy.proposals``.

    Args:
        config: the options.
        target: the engine's.
        method: by vLLM's name.
    """
    if config.draft_sample_method != "auto":
        return config.draft_sample_method
    # without training nobody measures what is accepted, and at temperature 0 it is the likeliest token alone
    if not config.train or not float(target.sampling.get("temperature", 1.0)) > 0.0:
        return "greedy"
    runner = runner_of({"method": method}, target.device_type)
    file, word = _CAN[runner.v2]
    if word not in source_of("vllm", file):
        return "greedy"
    kept = kept_logits(config, target) if runner.v2 else 0
    if target.device_type == "cuda" and kept > _ROOM:
        logger.warning(
            "spec-plugin: the draft proposes its likeliest tokens throughout: to draw them vLLM would keep the logits of %d "
            "tokens of each of %d requests, %.1f GiB on each card. A lower max_num_seqs or spec.k leaves it open",
            *(config.k, target.max_num_seqs, kept / 2**30),
        )
        return "greedy"
    return "probabilistic"
