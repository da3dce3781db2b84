"""Law 2's allow-list: the engine and sampling options under which speculation samples exactly from the target.

Only what is listed here starts. An option, or a value, that is not listed is refused, because new lossy modes appear in
vLLM releases. Each line says why it is exact or why it is refused; "read" refers to the sources of vLLM 0.29.0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spec_plugin.api.errors import SpecConfigError


@dataclass(frozen=True)
class OptionRule:
    """The allowed values of one option, and why."""

    allowed: Callable[[Any], bool]
    words: str  # the allowed values, for a person
    why: str


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda v: v in values and type(v) in {type(x) for x in values}


def _none(v: Any) -> bool:
    return v is None


def _false(v: Any) -> bool:
    return v is None or v is False


def _text_or_none(v: Any) -> bool:
    return v is None or isinstance(v, str)


def _integer(low: int, high: float = math.inf) -> Callable[[Any], bool]:
    return lambda v: v is None or (isinstance(v, int) and not isinstance(v, bool) and low <= v <= high)


def _real(low: float, high: float = math.inf) -> Callable[[Any], bool]:
    def check(v: Any) -> bool:
        real = isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)
        return v is None or (real and low <= v <= high)

    return check


def _empty(v: Any) -> bool:
    return v is None or v == [] or v == {} or v == () or v == ""


def _anything(_: Any) -> bool:
    return True


def _schedule(v: Any) -> bool:
    return v is None or all(len(row) == 3 and all(isinstance(n, int) and n >= 0 for n in row) for row in v)


def _load_config(v: Any) -> bool:
    return v is None or (
        isinstance(v, Mapping)
        and set(v) <= {"load_format"}
        and v.get("load_format") in ("auto", "safetensors", "dummy")
    )


METHODS = ("eagle3", "eagle", "mtp", "draft_model", "ngram", "suffix", "dflash")
_ANY_DRAFT = "any proposal is verified against the target, so this changes speed only"
_INTERNAL = "vLLM fills it in itself"
_UNTRIED = "exact in principle, but not tried with this package"

#: every option of vLLM's ``speculative_config``
SPECULATIVE: Mapping[str, OptionRule] = {
    "method": OptionRule(
        _one_of(*METHODS), " | ".join(METHODS), "proposals of these are verified by rejection sampling"
    ),
    "model": OptionRule(_text_or_none, "folder of the draft", _ANY_DRAFT),
    "num_speculative_tokens": OptionRule(_integer(1, 128), "1 to 128", _ANY_DRAFT),
    "num_speculative_tokens_per_batch_size": OptionRule(_schedule, "[(first, last, k), …]", _ANY_DRAFT),
    "rejection_sample_method": OptionRule(
        _one_of("standard", "block"),
        "standard | block",
        "both emit the target's distribution (arXiv 2211.17192, 2403.10444); synthetic, and any other, accept by another rule",
    ),
    "draft_sample_method": OptionRule(
        _one_of("greedy", "probabilistic"), "greedy | probabilistic", "the draft's own probabilities enter the test"
    ),
    "draft_tensor_parallel_size": OptionRule(_integer(1), "1 or the target's", _ANY_DRAFT),
    "max_model_len": OptionRule(_integer(1), "tokens", "beyond it nothing is drafted"),
    "draft_load_config": OptionRule(
        _load_config, '{"load_format": "auto" | "safetensors" | "dummy"}', "only how the draft's first weights are read"
    ),
    "enforce_eager": OptionRule(_one_of(None, True, False), "true | false", "no effect on what is computed"),
    "revision": OptionRule(_text_or_none, "text", "which draft is read"),
    "attention_backend": OptionRule(_text_or_none, "name", "of the draft only; " + _ANY_DRAFT),
    "moe_backend": OptionRule(_text_or_none, "name", "of the draft only; " + _ANY_DRAFT),
    "prompt_lookup_max": OptionRule(_integer(1), "at least 1", _ANY_DRAFT),
    "prompt_lookup_min": OptionRule(_integer(1), "at least 1", _ANY_DRAFT),
    "suffix_decoding_max_tree_depth": OptionRule(_integer(1), "at least 1", _ANY_DRAFT),
    "suffix_decoding_max_cached_requests": OptionRule(_integer(0), "at least 0", _ANY_DRAFT),
    "suffix_decoding_max_spec_factor": OptionRule(_real(0), "at least 0", _ANY_DRAFT),
    "suffix_decoding_min_token_prob": OptionRule(_real(0, 1), "0 to 1", _ANY_DRAFT),
    "quantization": OptionRule(_none, "none", "a quantized draft cannot be refreshed"),
    "code_revision": OptionRule(_none, "none", "nothing is executed from a checkpoint"),
    "tensor_parallel_size": OptionRule(_none, "none", "vLLM refuses it too; use draft_tensor_parallel_size"),
    "kv_cache_dtype": OptionRule(_none, "none", "the draft's cache follows the target's; another one is " + _UNTRIED),
    "index_share_for_mtp_iteration": OptionRule(_none, "none", _UNTRIED),
    "disable_padded_drafter_batch": OptionRule(_false, "false", _UNTRIED),
    "use_local_argmax_reduction": OptionRule(_false, "false", _UNTRIED),
    "use_heterogeneous_vocab": OptionRule(_false, "false", _UNTRIED),
    "parallel_drafting": OptionRule(_one_of(None, True, False), "true | false", _ANY_DRAFT),
    "synthetic_acceptance_rates": OptionRule(_none, "none", "accepts tokens by a fixed rate: not the target's samples"),
    "synthetic_acceptance_length": OptionRule(
        _none, "none", "accepts tokens by a fixed rate: not the target's samples"
    ),
    "enable_adaptive_verification": OptionRule(
        _false, "false", "verifies a part of the draft; not read closely enough to trust"
    ),
    "dspark_draft_topk": OptionRule(_none, "none", "belongs to a method that is not on this list"),
    "disable_eagle_block_drop": OptionRule(
        _one_of(None, True, False),
        "true | false",
        "the policy's own keys and values in the block that is kept depend on the tokens before them alone; the draft's last one "
        "may be made with the token that follows in another request, which changes what is proposed only "
        "(read: vLLM 0.31 and 0.32; where a target keeps recurrent states the prefix cache is off)",
    ),
    "target_model_config": OptionRule(_none, "none", _INTERNAL),
    "target_parallel_config": OptionRule(_none, "none", _INTERNAL),
    "draft_model_config": OptionRule(_none, "none", _INTERNAL),
    "draft_parallel_config": OptionRule(_none, "none", _INTERNAL),
}

#: fields that decide how a token is accepted; looked at again in the engine, whoever set them
_DECISIVE = (
    "method",
    "rejection_sample_method",
    "draft_sample_method",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
    "enable_adaptive_verification",
    "use_heterogeneous_vocab",
    "parallel_drafting",
)

_OUTPUT = "acts on tokens that are already sampled"
_PENALTY = (
    "the penalised distribution is not the policy's, so the recomputed log-probs differ; and drafted tokens count towards it "
    "in a way that is not the same on vLLM's two runners"
)

#: every sampling option of vLLM's ``SamplingParams``
SAMPLING: Mapping[str, OptionRule] = {
    "temperature": OptionRule(_real(0), "0 or more", "applied to every drafted position before the test (read)"),
    "top_p": OptionRule(
        _real(1e-9, 1), "above 0, at most 1", "applied to every drafted position before the test (read)"
    ),
    "top_k": OptionRule(_integer(-1), "-1, 0 or more", "applied to every drafted position before the test (read)"),
    "seed": OptionRule(
        _integer(-(2**63)), "any integer", "own random stream; the same distribution, other draws than without"
    ),
    "n": OptionRule(_integer(1), "at least 1", "separate requests"),
    "max_tokens": OptionRule(_integer(1), "at least 1", "the scheduler cuts what was accepted beyond it (read)"),
    "ignore_eos": OptionRule(_one_of(True, False), "true | false", "checked token by token in the scheduler (read)"),
    "stop_token_ids": OptionRule(
        _anything, "token ids", "checked token by token in the scheduler, the rest is cut (read)"
    ),
    "logprobs": OptionRule(_integer(-1), "-1, 0 or more", "of the target's logits at each emitted position (read)"),
    "allowed_token_ids": OptionRule(_anything, "token ids", "one constant mask for every position (read)"),
    "detokenize": OptionRule(_anything, "any", _OUTPUT),
    "skip_special_tokens": OptionRule(_anything, "any", _OUTPUT),
    "spaces_between_special_tokens": OptionRule(_anything, "any", _OUTPUT),
    "include_stop_str_in_output": OptionRule(_anything, "any", _OUTPUT),
    "output_kind": OptionRule(_anything, "any", _OUTPUT),
    "stream_interval": OptionRule(_anything, "any", _OUTPUT),
    "flat_logprobs": OptionRule(_anything, "any", _OUTPUT),
    "skip_clone": OptionRule(_anything, "any", "bookkeeping"),
    "skip_reading_prefix_cache": OptionRule(_anything, "any", "bookkeeping"),
    "extra_args": OptionRule(
        lambda v: v is None or set(v) <= {"spec_off"},
        "none, or {'spec_off': true}",
        "other keys are for logits processors, which vLLM refuses with speculation",
    ),
    "routed_experts_prompt_start": OptionRule(_integer(0), "0 or more", "bookkeeping"),
    "output_text_buffer_length": OptionRule(_anything, "any", "bookkeeping"),
    "stop": OptionRule(
        _empty,
        "none",
        "stop strings are looked for after a whole step, so accepted tokens behind the match stay in token_ids (read: "
        "v1/engine/detokenizer.py); use stop_token_ids",
    ),
    "min_tokens": OptionRule(
        _one_of(None, 0, 1),
        "0 or 1",
        "1 concerns the first token only, which is never drafted; beyond it the bonus token's stop tokens are masked by the "
        "length before the draft, so a sequence cannot end where it may "
        "(read: MinTokensLogitsProcessor.apply in v1/sample/logits_processor/builtin.py)",
    ),
    "presence_penalty": OptionRule(_one_of(None, 0, 0.0), "0", _PENALTY),
    "frequency_penalty": OptionRule(_one_of(None, 0, 0.0), "0", _PENALTY),
    "repetition_penalty": OptionRule(_one_of(None, 1, 1.0), "1", _PENALTY),
    "min_p": OptionRule(_one_of(None, 0, 0.0), "0", "vLLM refuses it with speculation"),
    "logit_bias": OptionRule(_empty, "none", "vLLM refuses it with speculation"),
    "bad_words": OptionRule(_empty, "none", "depends on drafted tokens; " + _UNTRIED),
    "structured_outputs": OptionRule(_none, "none", "the grammar advances over drafted tokens; " + _UNTRIED),
    "thinking_token_budget": OptionRule(_none, "none", "forces tokens; " + _UNTRIED),
    "repetition_detection": OptionRule(_none, "none", "ends a sequence by what it repeats; " + _UNTRIED),
    "logprob_token_ids": OptionRule(_none, "none", "not gathered by the rejection sampler (read)"),
    "prompt_logprobs": OptionRule(_none, "none", "corrupted by some drafts (vllm issue 53488); never evidence"),
    "prompt_logprob_token_ids": OptionRule(_none, "none", "as prompt_logprobs"),
    "prompt_logprob_start": OptionRule(_none, "none", "as prompt_logprobs"),
    "watermarking": OptionRule(_none, "none", "changes the distribution that is sampled"),
    "trace_decode_token_ids": OptionRule(_none, "none", "vLLM refuses it with speculation"),
}

#: engine options that change what is sampled or reported differently with and without speculation; all others act on both
ENGINE: Mapping[str, OptionRule] = {
    "logprobs_mode": OptionRule(
        _one_of(None, "raw_logprobs", "processed_logprobs"),
        "raw_logprobs | processed_logprobs",
        "both are log-probs of the target: before, or after, temperature, top_p and top_k; logits are no log-probs",
    ),
    "logits_processors": OptionRule(_empty, "none", "vLLM refuses them with speculation"),
    "pipeline_parallel_size": OptionRule(
        _one_of(None, 1), "1", "the draft and the weights that it shares must be in one stage"
    ),
}


def check_speculative_config(speculative_config: Mapping[str, Any]) -> None:
    """Check the options that are about to be handed to vLLM.

    Args:
        speculative_config: vLLM's ``speculative_config``, as a mapping.

    Raises:
        SpecConfigError: naming the option, its value, what is allowed and why.
    """
    if "method" not in speculative_config:
        raise SpecConfigError(f"speculative_config has no 'method': add one; allowed: {SPECULATIVE['method'].words}")
    _check("speculative_config", SPECULATIVE, speculative_config)


def check_running_config(speculative_config: Any) -> None:
    """Check what vLLM made of the options, inside the engine, where a checkpoint or another plugin may have changed them.

    Args:
        speculative_config: vLLM's own ``SpeculativeConfig`` object.

    Raises:
        SpecConfigError: for a lossy setting, and for a field of a newer vLLM that is not at its default.
    """
    values = {}
    for field in dataclasses.fields(speculative_config):
        value = getattr(speculative_config, field.name)
        default = field.default if field.default is not dataclasses.MISSING else None
        if field.name in _DECISIVE or (field.name not in SPECULATIVE and value != default):
            values[field.name] = value
    _check("the engine's speculative_config", SPECULATIVE, values)


def check_sampling(options: Mapping[str, Any]) -> None:
    """Check the sampling options of the rollouts.

    Raises:
        SpecConfigError: naming the option, its value, what is allowed and why.
    """
    _check("sampling option", SAMPLING, options)


def check_engine_options(options: Mapping[str, Any]) -> None:
    """Check those engine options that speculation makes a difference to; others pass, as they act with and without it.

    Raises:
        SpecConfigError: naming the option, its value, what is allowed and why.
    """
    _check("engine option", ENGINE, {name: value for name, value in options.items() if name in ENGINE})
    defaults = options.get("override_generation_config") or {}
    if not isinstance(defaults, Mapping):
        raise SpecConfigError(
            f"engine option override_generation_config={defaults!r}: expected a mapping of sampling options; leave it out"
        )
    _check("override_generation_config", SAMPLING, {k: v for k, v in defaults.items() if k in SAMPLING})


def _check(where: str, rules: Mapping[str, OptionRule], options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        rule = rules.get(name)
        if rule is None:
            raise SpecConfigError(
                f"{where} {name}={value!r} is not on the lossless allow-list, so it may change what is sampled; "
                f"leave it out. Known: {', '.join(sorted(rules))}"
            )
        if not _is_allowed(rule, value):
            raise SpecConfigError(f"{where} {name}={value!r} is refused; allowed: {rule.words}; why: {rule.why}")


def _is_allowed(rule: OptionRule, value: Any) -> bool:
    try:
        return rule.allowed(value)
    except TypeError:  # a value of a kind that the rule cannot even look at
        return False
