"""Law 2: only what is on the allow-list starts, and a new option of vLLM is noticed."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from pathlib import Path

import pytest

from spec_plugin.api.errors import SpecConfigError
from spec_plugin.engine import lossless
from spec_plugin.plan.sources import parsed

GOOD = {"method": "eagle3", "model": "/draft", "num_speculative_tokens": 3}


def vllm_fields(module: str, name: str) -> set[str]:
    """Fields of a class of the installed vLLM, read from its source: importing it would take ten seconds."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    tree = parsed((Path(spec.origin).parent / module).read_text())
    found = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)
    return {n.target.id for n in found.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


def test_every_speculative_option_of_the_installed_vllm_is_decided():
    new = vllm_fields("config/speculative.py", "SpeculativeConfig") - set(lossless.SPECULATIVE)
    assert not new, f"decide in lossless.SPECULATIVE whether these are exact: {sorted(new)}"


def test_every_sampling_option_of_the_installed_vllm_is_decided():
    fields = vllm_fields("sampling_params.py", "SamplingParams")
    new = {f for f in fields if not f.startswith("_")} - set(lossless.SAMPLING)
    assert not new, f"decide in lossless.SAMPLING whether these are exact: {sorted(new)}"


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"rejection_sample_method": "standard"},
        {"rejection_sample_method": "block"},
        {"draft_sample_method": "probabilistic"},
        {"num_speculative_tokens_per_batch_size": [(1, 64, 3)]},
        {"draft_load_config": {"load_format": "auto"}},
        {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1},
        {"method": "suffix", "suffix_decoding_min_token_prob": 0.1},
        {"method": "mtp", "model": None},
        {"disable_eagle_block_drop": True},
    ],
)
def test_exact_settings_start(extra):
    lossless.check_speculative_config({**GOOD, **extra})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rejection_sample_method", "synthetic"),
        ("rejection_sample_method", "fly"),
        ("rejection_sample_method", "typical_acceptance_sampler"),
        ("rejection_sample_method", None),
        ("posterior_threshold", 0.09),
        ("synthetic_acceptance_length", 2.5),
        ("synthetic_acceptance_rates", [0.9]),
        ("enable_adaptive_verification", True),
        ("method", "medusa"),
        ("method", "custom_class"),
        ("num_speculative_tokens", 0),
        ("num_speculative_tokens", True),
        ("num_speculative_tokens_per_batch_size", 3),
        ("draft_load_config", {"load_format": "pt"}),
        ("quantization", "fp8"),
        ("an_option_of_a_later_release", 1),
    ],
)
def test_anything_else_is_refused_with_option_value_and_what_is_allowed(option, value):
    with pytest.raises(SpecConfigError) as error:
        lossless.check_speculative_config({**GOOD, option: value})
    message = str(error.value)
    assert option in message and repr(value) in message and ("allowed:" in message or "Known:" in message)


def test_a_method_must_be_named():
    with pytest.raises(SpecConfigError, match="method"):
        lossless.check_speculative_config({"model": "some.module.Proposer", "num_speculative_tokens": 3})


@dataclasses.dataclass
class Running:
    method: str = "eagle3"
    rejection_sample_method: str = "standard"
    draft_sample_method: str = "greedy"
    synthetic_acceptance_rates: list[float] | None = None
    quantization: str | None = "fp8"  # vLLM fills it in for MTP; not a question of exactness
    mode_of_a_later_release: str = "off"


def test_the_engine_is_checked_again_whoever_set_its_options():
    lossless.check_running_config(Running())
    for lossy in (
        Running(rejection_sample_method="synthetic"),
        Running(synthetic_acceptance_rates=[0.5]),
        Running(mode_of_a_later_release="on"),
    ):
        with pytest.raises(SpecConfigError):
            lossless.check_running_config(lossy)


def test_sampling_options_of_the_trainers_pass():
    verl = dict(temperature=1.0, top_k=-1, top_p=1, repetition_penalty=1.0, logprobs=0, n=1, max_tokens=64, seed=None)
    lossless.check_sampling({**verl, "ignore_eos": False, "detokenize": False, "extra_args": {"spec_off": True}})
    lossless.check_sampling({"temperature": 0.7, "top_p": 0.9, "top_k": 20, "stop_token_ids": [1, 2], "min_tokens": 0})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("stop", ["</answer>"]),
        ("min_tokens", 4),
        ("min_p", 0.05),
        ("repetition_penalty", 1.05),
        ("presence_penalty", 0.5),
        ("logit_bias", {3: 1.0}),
        ("bad_words", ["no"]),
        ("prompt_logprobs", 0),
        ("temperature", float("nan")),
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("watermarking", {"key": 1}),
        ("extra_args", {"other": 1}),
    ],
)
def test_sampling_options_that_speculation_changes_are_refused(option, value):
    with pytest.raises(SpecConfigError, match=option):
        lossless.check_sampling({option: value})


def test_engine_options():
    lossless.check_engine_options(
        {"logprobs_mode": "processed_logprobs", "max_model_len": 1024, "logits_processors": []}
    )
    for bad in (
        {"logprobs_mode": "processed_logits"},
        {"logits_processors": ["m.P"]},
        {"pipeline_parallel_size": 2},
        {"override_generation_config": {"min_p": 0.1}},
    ):
        with pytest.raises(SpecConfigError):
            lossless.check_engine_options(bad)
