"""What a run would do, from its options alone; for ``spec-plugin check``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draft_training.files import weight_files
from draft_training.outside import text_part
from spec_plugin.commands.cache import share
from spec_plugin.commands.engine_limits import engine_limits
from spec_plugin.commands.judgement import Judgement
from spec_plugin.commands.shown import SHOWN
from spec_plugin.commands.untried import graphs_of, untried_in
from spec_plugin.config import SpecConfig
from spec_plugin.diagnosis import without_accelerator
from spec_plugin.engine.lossless import check_engine_options, check_sampling, check_speculative_config
from spec_plugin.engine.states import check_states
from spec_plugin.engine_class import NoHiddenStates, architectures, engine_class, keeps_states
from spec_plugin.errors import SpecConfigError
from spec_plugin.hub import DraftNotHereError, draft_folder, known_draft
from spec_plugin.manager import built_in_method, create_manager
from spec_plugin.method import Method
from spec_plugin.model_runner import runner_of
from spec_plugin.refusals import Objection
from spec_plugin.run_plan import RunFacts, RunPlan
from spec_plugin.session import method_of

if TYPE_CHECKING:
    from draft_training.draft import DraftShape

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: of one number of the actor's hidden states
_ACTOR_BYTES = 2
_MEBIBYTE = 1 << 20
_STATES = (
    "the target keeps recurrent states: the flag turns the engine's prefix caching and asynchronous scheduling off, each batch "
    "size drafts spec.k tokens or none, and the self-test covers the states"
)


def judge(plan: RunPlan) -> Judgement:
    """The adapter's objections, those of the core, and what the run would do."""
    run = plan.facts
    if run is None:
        return Judgement(plan.trainer, plan.objections, notes=plan.notes, unseen=plan.unseen)
    no_plugins = (*_plugins(run.spec),)
    objections = [*plan.objections, *no_plugins, *_lossless(run), *_truncated(run)]
    unseen, notes = [*plan.unseen], [*plan.notes]
    facts = {"model": f"{run.model.name} ({run.model.source})" if run.model.config else run.model.name}
    method: Method | None = None
    if run.model.config is None:
        if run.model.unreadable:
            objections.append(_of_model(run, "an unreadable model", run.model.source, "repair it"))
        unseen.append(
            f"model {run.model.name}: {run.model.source}, so whether a draft can be made for it, and its size, was "
            "not checked; give its config.json with --model-config FILE"
        )
    else:
        try:
            here = replace(run.target, device_type=_device_type())
            method = built_in_method(run.spec, here)
            if method is None and not no_plugins:  # that of a plugin, or of nobody
                method = method_of(run.spec, here, create_manager(run.spec.block, run.spec.plugins))
            if method is not None:
                objections += _lossy_method(method)
                check_states(run.target.hf_config, method.ragged, method.name)
                if keeps_states(run.target.hf_config):
                    notes.append(_STATES)
        except DraftNotHereError as error:
            unseen.append(str(error))
        except SpecConfigError as error:
            objections.append(_about_draft(run, error))
        reads_states = method is not None and method.newborn and method.harvest
        if reads_states and run.spec.draft is None and (known := known_draft(run.target)):
            notes.append(known.sentence)
        objections += engine_limits(run, method)
    draft = method.draft.config if method is not None and method.draft is not None else None
    if draft is not None and method is not None and method.harvest:
        notes += _untried(run.target.hf_config)
    facts |= dict(_facts(run, method))
    return Judgement(plan.trainer, tuple(objections), facts, tuple(notes), tuple(unseen), run.shapes)


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


def _untried(hf_config: Mapping[str, Any]) -> Iterator[str]:
    """What has not been validated with this target's class."""
    found = engine_class(hf_config)
    if found is None:
        named = " or ".join(architectures(hf_config)) or "this model"
        yield (
            f"no vLLM that is installed here knows {named} by itself, so whether a draft can read its hidden states shows only "
            "when the engine starts"
        )
    elif (level := SHOWN.get(found.name)) is None:
        yield f"vLLM's class {found.name} hands out hidden states, but no run with such a target has been tried"
    elif level == "engine":
        yield f"drafting for vLLM's class {found.name} was tried in the engine, but in no run of a trainer"


def _facts(run: RunFacts, method: Method | None) -> Iterator[tuple[str, str]]:
    spec, target = run.spec, run.target
    draft = method.draft.config if method is not None and method.draft is not None else None
    origin = "nothing to train"
    if method is not None and method.draft is not None:
        origin = "a new draft" if method.newborn else "the draft that the target brings"
    if spec.draft:
        origin = f"the draft in {spec.draft}"
    serving = {
        "auto": "drafting where it was measured to win, plain decoding elsewhere",
        "always": "drafting from the first step",
        "never": "the draft is trained and never served",
    }
    name = f"{method.name} ({spec.method}: {method.why})" if method is not None and method.why else spec.method
    yield "method", f"{name} with {origin}, up to {spec.k} tokens a step; {serving[spec.serve]}"
    yield "shape", run.shape
    if draft is not None:
        assert method is not None
        yield "draft on the actor", _actor_memory(run, method, draft)
        yield "draft in the engine", _engine_memory(run, draft)
    elif method is not None and spec.draft:  # served as it is
        yield "draft in the engine", _served_memory(run, method, Path(draft_folder(spec.draft, target, fetch=False)))
    requests, length = target.max_num_seqs or "of vLLM", target.max_model_len or "of the model"
    yield "engine", f"{target.dtype}, max_num_seqs {requests}, max_model_len {length}"
    runner = runner_of(method.settings if method is not None else {"method": spec.method}, _device_type())
    yield "model runner", runner.words
    yield "CUDA graphs", graphs_of(runner, _device_type(), run.graphs, run.eager, run.spec.full_graphs)
    yield "never run on a GPU", untried_in(run, method, runner, _device_type())
    yield "verified", "; ".join(_verified(run))
    yield "not verified", "; ".join(_not_verified(run))


def _actor_memory(run: RunFacts, method: Method, draft: DraftShape) -> str:
    weights = 4 * draft.parameters / _MEBIBYTE
    if not run.spec.train:
        return f"{_size(weights)} of weights; it is not trained"
    per_token = (len(method.harvest or ()) + 1) * draft.hidden_size * _ACTOR_BYTES
    buffer = min(run.spec.buffer_mb, run.spec.buffer_tokens * per_token / _MEBIBYTE)
    on_the_way = min(run.spec.harvest_tokens * per_token / _MEBIBYTE, buffer)
    tensors = 1 if text_part(run.target.hf_config).get("tie_word_embeddings") else 2
    policy = tensors * draft.vocab_size * draft.hidden_size * _ACTOR_BYTES / _MEBIBYTE
    return (
        f"{draft.parameters / 1e6:.0f}M parameters on every rank: {_size(weights)} of weights, {_size(weights)} of "
        f"gradients while it trains, {_size(weights)} of optimizer state (float32), {_size(policy)} of copies of the "
        f"policy's embedding and head (on a GPU, host memory keeps these two between slices), and, whatever the length of "
        f"responses, up to {_size(buffer)} of captured hidden states in host memory and {_size(on_the_way)} on their way there "
        "(a GPU holds the former while the draft trains); spec-plugin doctor --target adds a step of training"
    )


def _engine_memory(run: RunFacts, draft: DraftShape) -> str:
    weights = draft.parameters * _BYTES.get(run.target.dtype, 2) / _MEBIBYTE
    return f"{_size(weights)} of weights{_beside(run, share(draft.to_hf(), run.target.hf_config, draft.of_target))}"


def _served_memory(run: RunFacts, method: Method, folder: Path) -> str:
    weights = sum(file.stat().st_size for file in weight_files(folder) if file.is_file()) / _MEBIBYTE
    return f"{_size(weights)} of weights on disk{_beside(run, share(method.draft_config or {}, run.target.hf_config))}"


def _beside(run: RunFacts, cache: str) -> str:
    split = f", split over {run.target.tensor_parallel} ranks" if run.target.tensor_parallel > 1 else ""
    return f"{split}, and {cache}" if cache else split


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
