"""What a run would do, from its options alone: the ``Judgement`` that ``spec-plugin check`` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draft_training.files import weight_files
from draft_training.outside import text_part
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import CannotDraft, SpecConfigError
from spec_plugin.api.method import Method
from spec_plugin.commands.graphs import NEVER_RUN, graphs_of
from spec_plugin.engine.lossless import check_engine_options, check_sampling, check_speculative_config
from spec_plugin.engine.recurrent_states import check_states
from spec_plugin.lifecycle.manager import built_in_method, create_manager, method_of
from spec_plugin.methods.sample_method import kept_logits, proposed_logits
from spec_plugin.plan.engine_class import architectures, engine_class, keeps_states
from spec_plugin.plan.hub import DraftNotHereError, draft_folder
from spec_plugin.plan.model_runner import Cluster
from spec_plugin.plan.refusals import Objection, truncated_in_loss
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
_STATES = (
    "the target keeps recurrent states: the flag turns the engine's prefix caching and asynchronous scheduling off, each batch "
    "size drafts spec.k tokens or none, and the self-test covers the states"
)
_SERVING = {
    "auto": "drafting where it was measured to win, plain decoding elsewhere",
    "always": "drafting from the first step",
    "never": "the draft is trained and never served",
}


@dataclass(frozen=True)
class Judgement:
    """Would this run be accepted, and what would it do?"""

    trainer: str
    objections: tuple[Objection, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)  # what it would do, by subject
    notes: tuple[str, ...] = ()  # of interest; they stop nothing
    unseen: tuple[str, ...] = ()  # what could not be checked, and why

    @property
    def accepted(self) -> bool:
        """True when nothing that was checked stops the run."""
        return not self.objections


def judge(plan: RunPlan, cluster: Cluster | None = None) -> Judgement:
    """The adapter's objections, those of the core, and what the run would do.

    Args:
        plan: what the adapter makes of the run.
        cluster: the machines that it is judged for; None: this one.
    """
    if plan.facts is None:
        return Judgement(plan.trainer, plan.objections, notes=plan.notes, unseen=plan.unseen)
    cluster = cluster or Cluster()
    run = replace(plan.facts, target=replace(plan.facts.target, device_type=cluster.device_type))
    spec, target = run.spec, run.target
    objections, unseen, notes = [*plan.objections], [*plan.unseen], [*plan.notes]
    if run.sleeps:
        notes.append("the engine sleeps between rollouts: the draft is refreshed after each wake")
    if spec.block or spec.plugins:  # by the code that the run asks, which loads torch
        instead = "correct the name, or remove it"
        objections += _raised("a plugin that is not there", instead, create_manager, spec.block, spec.plugins)
    for check, options in ((check_engine_options, target.engine_options), (check_sampling, target.sampling)):
        for name, value in options.items():  # each alone: the allow-list stops at the first
            objections += _raised(f"a lossy option ({name})", "remove it", check, {name: value})
    objections += truncated_in_loss(target.sampling, run.rollout_in_loss)
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
            instead = "change the option that is named"
            objections += _raised("a spec option", instead, check_speculative_config, method.settings)
            check_states(target.hf_config, method.variable_length, method.name)
            notes += _about_target(run, method)
        except DraftNotHereError as error:
            unseen.append(str(error))
        except CannotDraft as error:
            objections.append(_of_model(run, error.reason, error.why, error.instead))
        except SpecConfigError as error:
            if not any(str(error) == objection.why for objection in objections):  # of plugins, it was said
                instead = "change the option or file that is named"
                objections.append(_of_model(run, "a draft for this model", str(error), instead))
    facts = dict(_facts(run, method, cluster))
    return Judgement(plan.trainer, tuple(objections), facts, tuple(notes), tuple(unseen))


def _method(run: RunFacts) -> Method:
    """What would draft, by the run's own code; torch is loaded only for a plugin's."""
    return built_in_method(run.spec, run.target) or method_of(
        run.spec, run.target, create_manager(run.spec.block, run.spec.plugins)
    )


def _raised(reason: str, instead: str, check: Callable[..., object], *arguments: Any) -> Iterator[Objection]:
    """What the run's own check raises of these arguments, as an objection."""
    try:
        check(*arguments)
    except SpecConfigError as error:
        yield Objection("", "", reason, str(error), instead)


def _of_model(run: RunFacts, reason: str, why: str, instead: str) -> Objection:
    return Objection(run.model_option, run.model.name, reason, why, instead)


def _about_target(run: RunFacts, method: Method) -> Iterator[str]:
    """What has not been shown with the target's class."""
    hf_config = run.target.hf_config
    if keeps_states(hf_config):
        yield _STATES
    if method.draft is None or not method.harvest:
        return
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


def _facts(run: RunFacts, method: Method | None, cluster: Cluster) -> Iterator[tuple[str, str]]:
    spec, target, device = run.spec, run.target, cluster.device_type
    if cluster.card or cluster.vllm:
        vllm = f"vLLM {cluster.vllm}" if cluster.vllm else "the vLLM that is installed here"
        yield (
            "judged for",
            f"{cluster.card or 'the devices of this machine'} with {vllm}; all else as this machine has it",
        )
    yield "model", f"{run.model.name} ({run.model.source})" if run.model.config else run.model.name or "not seen"
    yield "method", f"{_drafting(spec, method)}, up to {spec.k} tokens a step; {_SERVING[spec.serve]}"
    yield "shape", run.shape
    if method is not None and method.draft is not None:
        yield "draft on the actor", _actor_memory(spec, method.draft.config)
    if method is not None and (method.draft is not None or spec.draft):
        yield "draft in the engine", _engine_memory(run, method, cluster)
    requests, length = target.max_num_seqs or "of vLLM", target.max_model_len or "of the model"
    yield "engine", f"{target.dtype}, max_num_seqs {requests}, max_model_len {length}"
    runner = cluster.runner_of(method.settings if method is not None else {"method": spec.method})
    yield "model runner", runner.words
    yield "CUDA graphs", graphs_of(runner, cluster)
    yield "never run on a GPU", NEVER_RUN[device]
    checked = "every response, against the actor's"
    if run.bypass:
        checked = f"{spec.bypass_check_sequences} sequences a step: the trainer skips its log-prob pass"
    samples = "samples with and without the draft, on each engine before one is served; " if spec.self_test else ""
    yield "verified", f"{samples}the log-probs of {checked}; the digest of every refresh"
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


def _actor_memory(spec: SpecConfig, draft: DraftShape) -> str:
    weights = _size(4 * draft.parameters)
    if not spec.train:
        return f"{weights} of weights; it is not trained"
    return (
        f"{draft.parameters / 1e6:.0f}M parameters on every rank: {weights} each of weights, of optimizer state and, while it "
        "trains, of gradients (float32). Between slices of training a GPU has the weights alone, host memory the rest; "
        "spec-plugin doctor --target adds the policy's head, captured hidden states and a step of training"
    )


def _engine_memory(run: RunFacts, method: Method, cluster: Cluster) -> str:
    if method.draft is not None:
        size = method.draft.config.parameters * _BYTES.get(run.target.dtype, 2)
    else:  # served as it is
        folder = Path(draft_folder(str(run.spec.draft), fetch=False))
        size = sum(file.stat().st_size for file in weight_files(folder) if file.is_file())
    split = f", split over {run.target.tensor_parallel} ranks" if run.target.tensor_parallel > 1 else ""
    own = method.draft is not None and method.draft_config == run.target.hf_config  # a layer of it
    counts = (text_part(hf or {}).get("num_hidden_layers") for hf in (method.draft_config, run.target.hf_config))
    layers, beside = (count if isinstance(count, int) else "some" for count in counts)
    more = "1 layer" if own or layers == 1 else f"{layers} layers"
    drawn = f"; {_kept(run, method, cluster)} for what drafted tokens are drawn from" if method.draws else ""
    return f"{_size(size)} of weights{split}, and the KV cache of {more} beside the target's {beside}{drawn}"


def _kept(run: RunFacts, method: Method, cluster: Cluster) -> str:
    """Memory of an engine for the logits of what was proposed: V2 takes it at its start, V1 while it drafts."""
    known = run.target.max_num_seqs > 0
    target = run.target if known else replace(run.target, max_num_seqs=1)
    each = "" if known else " a request"
    if cluster.runner_of(method.settings).v2:
        return f"{_size(kept_logits(run.spec, target))}{each}"
    # in float32, and a copy to verify
    return (
        f"up to {_size(8 * proposed_logits(run.spec, target))}{each}, or fewer drafted tokens where that has no room,"
    )


def _size(of_bytes: int) -> str:
    return f"{of_bytes / 2**30:.1f} GiB" if of_bytes >= 2**30 else f"{of_bytes / 2**20:.0f} MiB"


def _not_verified(run: RunFacts) -> Iterator[str]:
    if run.target.truncated:
        yield "rollout log-probs of truncated sampling (top_p, top_k), except that they are finite"
    if not run.spec.self_test:
        yield "the engine's samples (spec.self_test is off)"
    yield "validation rollouts; whether drafting pays, which only the run can measure; this machine (spec-plugin doctor)"
