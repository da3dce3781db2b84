"""What vLLM refuses by a model's config.json and the run's options alone, minutes after the start: said by ``check`` at once.

Each rule stands in vLLM 0.24 and 0.29 alike: ``ModelConfig.verify_with_parallel_config`` and ``_get_and_verify_max_len``,
``SchedulerConfig.verify_max_model_len``, and the layers that split themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from draft_training.outside import text_part
from draft_training.rope import derived_length
from spec_plugin.method import Method
from spec_plugin.refusals import OURS, Objection
from spec_plugin.run_plan import RunFacts

#: what families call the number of experts of a layer
EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
ALLOW_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
#: vLLM fills a vocabulary up to a multiple of this before it splits it
_VOCABULARY_STEP = 64
_MOST_RANKS = 1024
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")


@dataclass(frozen=True)
class Split:
    """A number of a model that tensor parallel ranks share out."""

    what: str  # a noun in the plural, for the message
    field: str  # of config.json
    count: int
    replicable: bool = False  # with more ranks than there are of them, each may be on several ranks
    step: int = 1  # is filled up to a multiple of this before it is split

    def fits(self, ranks: int) -> bool:
        """Can that many ranks share it out evenly."""
        if self.replicable and ranks > self.count:
            return ranks % self.count == 0
        return -(-self.count // self.step) * self.step % ranks == 0


def engine_limits(run: RunFacts, method: Method | None) -> Iterator[Objection]:
    """What vLLM will refuse when it starts for this run.

    Args:
        run: with the config.json of its model.
        method: what drafts; None: a plugin's, which is not known here.
    """
    if run.target.engine_options.get("hf_overrides"):
        return  # another config.json than ours
    yield from _tensor_parallel(run, method)
    yield from _length(run)
    yield from _batched_tokens(run)


def _tensor_parallel(run: RunFacts, method: Method | None) -> Iterator[Objection]:
    ranks = run.target.tensor_parallel
    if ranks <= 1:
        return
    policy = splits(run.target.hf_config)
    draft: list[Split] = []
    if method is not None and method.settings.get("draft_tensor_parallel_size") != 1:
        draft = [split for split in splits(method.draft_config or {}) if split not in policy]
    everything = [*policy, *draft]
    fitting = [str(n) for n in range(1, min(ranks, _MOST_RANKS + 1)) if all(split.fits(n) for split in everything)]
    for whose, of_it, by in (("policy", policy, "vLLM"), ("draft", draft, OURS)):  # without the flag there is no draft
        for split in (s for s in of_it if not s.fits(ranks)):
            yield Objection(
                run.tensor_parallel_option,
                str(ranks),
                f"{split.what} of the {whose} that tensor parallel ranks cannot share out",
                f"vLLM would refuse to start: the {whose}'s {split.count} {split.what} ({split.field}) cannot be shared out "
                f"evenly to {ranks} tensor parallel ranks",
                f"set it to {'one of ' * (len(fitting) > 1)}{', '.join(fitting)}",
                by,
            )


def splits(hf: Mapping[str, Any]) -> list[Split]:
    """What tensor parallel ranks share out of a model; nothing of a field that is not there or is no plain number.

    Args:
        hf: its config.json.
    """
    text = text_part(hf)
    found = [_split(text, "attention heads", ("num_attention_heads",))]
    if "kv_lora_rank" not in text and not text.get("multi_query"):  # MLA keeps one latent vector, multi-query one head
        found.append(_split(text, "key-value heads", _KV_HEADS, replicable=True))
    experts = _count(text, EXPERTS)
    if experts is None or text.get("first_k_dense_replace"):
        found.append(_split(text, "features of the MLP", ("intermediate_size",)))
    if experts is not None:
        found.append(_split(text, "features of an expert", ("moe_intermediate_size",)))
    found.append(_split(text, "features of the shared expert", ("shared_expert_intermediate_size",)))
    found.append(_split(text, "tokens of the vocabulary", ("vocab_size",), step=_VOCABULARY_STEP))
    return [split for split in found if split is not None]


def _split(text: Mapping[str, Any], what: str, fields: tuple[str, ...], **more: Any) -> Split | None:
    found = _count(text, fields)
    return None if found is None else Split(what, *found, **more)


def _count(text: Mapping[str, Any], fields: tuple[str, ...]) -> tuple[str, int] | None:
    """The first of these fields that is a positive whole number, as it is counted once for all layers."""
    for field in fields:
        value = text.get(field)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return field, value
    return None


def _length(run: RunFacts) -> Iterator[Objection]:
    asked, most = run.target.max_model_len, derived_length(run.target.hf_config)
    if asked is None or most is None or asked <= most[1] or os.environ.get(ALLOW_LONG, "0") not in ("", "0"):
        return
    yield Objection(
        "max_model_len",
        str(asked),
        "sequences that are longer than the model allows",
        f"vLLM would refuse to start: the engine is asked for sequences of {asked} tokens, and the model's config.json allows "
        f"{most[1]} ({most[0]})",
        "make prompt and response shorter, or give a model with a longer context",
        "vLLM",
    )


def _batched_tokens(run: RunFacts) -> Iterator[Objection]:
    options = run.target.engine_options
    tokens, requests = options.get("max_num_batched_tokens"), options.get("max_num_seqs")
    if isinstance(tokens, int) and isinstance(requests, int) and tokens < requests:
        yield Objection(
            "max_num_batched_tokens",
            str(tokens),
            "fewer tokens a step than requests",
            f"vLLM would refuse to start: a step computes {tokens} tokens at most, and max_num_seqs lets it have {requests} "
            "requests",
            f"set it to {requests} or more, or max_num_seqs to {tokens} or less",
            "vLLM",
        )
