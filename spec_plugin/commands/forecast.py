"""What a run would do, from its options alone; for ``spec-plugin check``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draft_training.files import weight_files
from draft_training.outside import text_part
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.diagnosis import without_accelerator
from spec_plugin.api.errors import SpecConfigError
from spec_plugin.api.method import Method
from spec_plugin.commands.graphs import graphs_of, never_run
from spec_plugin.commands.judgement import Judgement
from spec_plugin.engine.lossless import check_engine_options, check_sampling, check_speculative_config
from spec_plugin.engine.recurrent_states import check_states
from spec_plugin.lifecycle.manager import built_in_method, create_manager
from spec_plugin.lifecycle.session import method_of
from spec_plugin.plan.engine_class import NoHiddenStates, architectures, engine_class, keeps_states
from spec_plugin.plan.hub import DraftNotHereError, draft_folder, known_draft
from spec_plugin.plan.model_runner import runner_of
from spec_plugin.plan.refusals import Objection
from spec_plugin.plan.run_plan import RunFacts, RunPlan

if TYPE_CHECKING:
    from draft_training.draft import DraftShape

#: vLLM's classes of targets that were drafted for, with a tiny policy of each: in a whole run of a trainer, whose acceptance
#: rose (``spec-plugin conformance --target FAMILY``)
SHOWN_IN_A_TRAINER = """DeepseekV3ForCausalLM Gemma4ForCausalLM Glm4ForCausalLM GlmForCausalLM GptOssForCausalLM
LlamaForCausalLM MistralForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM
Qwen3VLForConditionalGeneration Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration SeedOssForCausalLM"""
#: and in the engine alone (tests/engine/test_families.py)
SHOWN_IN_AN_ENGINE = """ArceeForCausalLM Glm4vForConditionalGeneration Mistral3ForConditionalGeneration Phi3ForCausalLM
Qwen2_5_VLForConditionalGeneration"""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: of one number of the actor's hidden states
_ACTOR_BYTES = 2
_MEBIBYTE = 1 << 20
_STATES = (
    "the target keeps recurrent states: the flag turns the engine's prefix caching and asynchronous scheduling off, each batch "
    "size drafts spec.k tokens or none, and the self-test covers the states"
)
_SERVING = {
    "auto": "drafting where it was measured to win, plain decoding elsewhere",
    "always": "drafting from the first step",
    "never": "the draft is trained and never served",
}


def judge(plan: RunPlan) -> Judgement:
    """The adapter's objections, those of the core, and what the run would do."""
    run = plan.facts
    if run is None:
        return Judgement(plan.trainer, plan.objections, notes=plan.notes, unseen=plan.unseen)
    objections = [*plan.objections, *_plugins(run.spec), *_lossless(run), *_truncated(run)]
    unseen, notes = [*plan.unseen], [*plan.notes]
    method: Method | None = None
    if run.model.config is None:
        if run.model.unreadable:
            objections.append(_of_model(run, "an unreadable model", run.model.source, "repair it"))
        name = f"model {run.model.name}: {run.model.source}" if run.model.name else "the model: none was seen"
        unseen.append(
            f"{name}, so whether a draft can be made for it, and its size, was not checked; give its config.json with "
            "--model-config FILE"
        )
    else:
        try:
            method = _method(run)
            objections += [*_lossy_method(method), *_heads_of_the_draft(run, method)]
            check_states(run.target.hf_config, method.ragged, method.name)
            notes += _about_target(run, method)
        except DraftNotHereError as error:
            unseen.append(str(error))
        except SpecConfigError as error:
            if not any(str(error) == objection.why for objection in objections):  # of plugins, it was said
                objections.append(_about_draft(run, error))
    facts = dict(_facts(run, method))
    return Judgement(plan.trainer, tuple(objections), facts, tuple(notes), tuple(unseen), run.shapes)


def _method(run: RunFacts) -> Method:
    """What would draft, by the run's own code; torch is loaded only for a plugin's."""
    here = replace(run.target, device_type=_device_type())
    return built_in_method(run.spec, here) or method_of(
        run.spec, here, create_manager(run.spec.block, run.spec.plugins)
    )


def _plugins(spec: SpecConfig) -> Iterator[Objection]:
    """Names to block and plugins to add, by the code that the run asks; only where there are some, since it loads torch."""
    if not (spec.block or spec.plugins):
        return
    try:
        create_manager(spec.block, spec.plugins)
    except SpecConfigError as error:
        yield Objection("", "", "a plugin that is not there", str(error), "correct the name, or remove it")


def _lossless(run: RunFacts) -> Iterator[Objection]:
    """The engine's and sampling options, each asked alone: the allow-list stops at the first."""
    options: list[tuple[Any, Mapping[str, Any]]] = [
        *((check_engine_options, {name: value}) for name, value in run.target.engine_options.items()),
        *((check_sampling, {name: value}) for name, value in run.target.sampling.items()),
    ]
    for check, option in options:
        try:
            check(option)
        except SpecConfigError as error:
            yield Objection("", "", f"a lossy option ({next(iter(option))})", str(error), "remove it")


def _lossy_method(method: Method) -> Iterator[Objection]:
    try:
        check_speculative_config(method.settings, _device_type())
    except SpecConfigError as error:
        yield Objection("", "", "a spec option", str(error), "set spec.draft_sample_method to greedy")


def _heads_of_the_draft(run: RunFacts, method: Method) -> Iterator[Objection]:
    """Those that tensor parallel ranks cannot share out, for which vLLM would not start; of the policy's it says so itself."""
    ranks = run.target.tensor_parallel
    configs = (method.draft_config, run.target.hf_config)
    draft, policy = (text_part(hf or {}).get("num_attention_heads") for hf in configs)
    if not (isinstance(draft, int) and isinstance(policy, int) and ranks > 0):
        return
    if draft % ranks and not policy % ranks and method.settings.get("draft_tensor_parallel_size") != 1:
        reason = "attention heads of the draft that tensor parallel ranks cannot share out"
        why = f"vLLM would refuse to start: {ranks} tensor parallel ranks cannot share out the draft's {draft} attention heads"
        yield Objection(run.tensor_parallel_option, str(ranks), reason, why, f"set it to a divisor of {draft}")


def _device_type() -> str:
    return "cpu" if without_accelerator() else "cuda"


def _truncated(run: RunFacts) -> Iterator[Objection]:
    top_p, top_k = run.target.sampling.get("top_p", 1.0), run.target.sampling.get("top_k", -1)
    if run.rollout_in_loss and run.target.truncated:
        yield Objection(
            "top_p, top_k",
            f"{top_p}, {top_k}",
            "truncated sampling whose log-probs enter the loss",
            "rollout log-probs enter the loss, and those of truncated sampling cannot be verified, so the run would stop at "
            "its first step",
            "set top_p=1.0 and top_k=-1, or turn the correction by rollout log-probs off",
        )


def _about_draft(run: RunFacts, error: SpecConfigError) -> Objection:
    if isinstance(error, NoHiddenStates):
        return _of_model(run, error.reason, error.why, error.instead)
    return _of_model(run, "a draft for this model", str(error), "change the option or file that is named")


def _of_model(run: RunFacts, reason: str, why: str, instead: str) -> Objection:
    return Objection(run.model_option, run.model.name, reason, why, instead)


def _about_target(run: RunFacts, method: Method) -> Iterator[str]:
    """Public drafts for this target, and what has not been shown with its class."""
    hf_config = run.target.hf_config
    if keeps_states(hf_config):
        yield _STATES
    if method.draft is None or not method.harvest:
        return
    if method.newborn and run.spec.draft is None and (known := known_draft(run.target)):
        yield known.sentence
    found = engine_class(hf_config)
    if found is None:
        named = " or ".join(architectures(hf_config)) or "this model"
        yield (
            f"no vLLM that is installed here knows {named} by itself, so whether a draft can read its hidden states shows only "
            "when the engine starts"
        )
    elif found.name in SHOWN_IN_AN_ENGINE.split():
        yield f"drafting for vLLM's class {found.name} was tried in the engine, but in no run of a trainer"
    elif found.name not in SHOWN_IN_A_TRAINER.split():
        yield f"vLLM's class {found.name} hands out hidden states, but no run with such a target has been tried"


def _facts(run: RunFacts, method: Method | None) -> Iterator[tuple[str, str]]:
    spec, target, device = run.spec, run.target, _device_type()
    yield "model", f"{run.model.name} ({run.model.source})" if run.model.config else run.model.name or "not seen"
    yield "method", f"{_drafting(spec, method)}, up to {spec.k} tokens a step; {_SERVING[spec.serve]}"
    yield "shape", run.shape
    if method is not None and method.draft is not None:
        yield "draft on the actor", _actor_memory(run, method, method.draft.config)
    if method is not None and (method.draft is not None or spec.draft):
        yield "draft in the engine", _engine_memory(run, method)
    requests, length = target.max_num_seqs or "of vLLM", target.max_model_len or "of the model"
    yield "engine", f"{target.dtype}, max_num_seqs {requests}, max_model_len {length}"
    runner = runner_of(method.settings if method is not None else {"method": spec.method}, device)
    yield "model runner", runner.words
    yield "CUDA graphs", graphs_of(runner, device, run.graphs, run.eager)
    yield "never run on a GPU", never_run(device)
    yield "verified", "; ".join(_verified(run))
    yield "not verified", "; ".join(_not_verified(run))


def _drafting(spec: SpecConfig, method: Method | None) -> str:
    """The method, why it was chosen, and what draft it begins with, as far as that is known."""
    name = f"{method.name} ({spec.method}: {method.why})" if method is not None and method.why else spec.method
    if spec.draft:
        return f"{name} with the draft in {spec.draft}"
    if method is None:
        return name
    if method.draft is None:
        return f"{name} with nothing to train"
    return f"{name} with {'a new draft' if method.newborn else 'the draft that the target brings'}"


def _actor_memory(run: RunFacts, method: Method, draft: DraftShape) -> str:
    weights = 4 * draft.parameters / _MEBIBYTE
    if not run.spec.train:
        return f"{_size(weights)} of weights; it is not trained"
    per_token = (len(method.harvest or ()) + 1) * draft.hidden_size * _ACTOR_BYTES
    buffer = min(run.spec.buffer_mb, run.spec.buffer_tokens * per_token / _MEBIBYTE)
    tensors = 1 if text_part(run.target.hf_config).get("tie_word_embeddings") else 2
    policy = tensors * draft.vocab_size * draft.hidden_size * _ACTOR_BYTES / _MEBIBYTE
    return (
        f"{draft.parameters / 1e6:.0f}M parameters on every rank: {_size(weights)} each of weights, of optimizer state and, "
        f"while it trains, of gradients (float32); {_size(policy)} of copies of the policy's embedding and head; up to "
        f"{_size(buffer)} of captured hidden states. Between slices of training a GPU has the weights alone, host memory the "
        "rest; spec-plugin doctor --target adds a step of training"
    )


def _engine_memory(run: RunFacts, method: Method) -> str:
    if method.draft is not None:
        size = _size(method.draft.config.parameters * _BYTES.get(run.target.dtype, 2) / _MEBIBYTE)
    else:  # served as it is
        folder = Path(draft_folder(str(run.spec.draft), run.target, fetch=False))
        size = _size(sum(file.stat().st_size for file in weight_files(folder) if file.is_file()) / _MEBIBYTE)
    split = f", split over {run.target.tensor_parallel} ranks" if run.target.tensor_parallel > 1 else ""
    own = method.draft is not None and method.draft.config.of_target  # its config.json is the target's
    counts = (text_part(hf or {}).get("num_hidden_layers") for hf in (method.draft_config, run.target.hf_config))
    layers, beside = (count if isinstance(count, int) else "some" for count in counts)
    more = "1 layer" if own or layers == 1 else f"{layers} layers"
    return f"{size} of weights{split}, and the KV cache of {more} beside the target's {beside}"


def _size(mebibytes: float) -> str:
    return f"{mebibytes / 1024:.1f} GiB" if mebibytes >= 1024 else f"{mebibytes:.0f} MiB"


def _verified(run: RunFacts) -> Iterator[str]:
    if run.spec.self_test:
        yield "samples with and without the draft, on each engine before the first rollout"
    if run.bypass:
        yield f"log-probs of {run.spec.bypass_check_sequences} sequences a step: the trainer skips its log-prob pass"
    else:
        yield "the log-probs of every response, against the actor's"
    yield "the digest of every refresh"


def _not_verified(run: RunFacts) -> Iterator[str]:
    if run.target.truncated:
        yield "rollout log-probs of truncated sampling (top_p, top_k), except that they are finite"
    if not run.spec.self_test:
        yield "the engine's samples (spec.self_test is off)"
    yield "validation rollouts; whether drafting pays, which only the run can measure; this machine (spec-plugin doctor)"
