"""``spec-plugin check verl``: what it accepts, what it refuses and with which words, and that the run uses the same."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from builders.check_command import MODEL, PATH, ROLLOUT, SPEC, VLLM, a_qwen3, needs_verl
from builders.paths import ROOT
from omegaconf import OmegaConf
from safetensors.torch import save_file
from spec_plugin_verl_check import compose, options

from spec_plugin import SpecConfigError
from spec_plugin.commands.check import judge_run
from spec_plugin.plan.run_plan import Model


@pytest.fixture(scope="session", autouse=True)
def _yaml_in_c() -> Iterator[None]:
    """verl's configuration is 30 files, and a dozen tests compose it: half of their time is PyYAML's scanner in Python."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml, "SafeLoader", getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        yield


@pytest.fixture(scope="session")
def stock(_yaml_in_c: None) -> Any:
    """verl's own configuration, with vLLM: the parts that are asked, as a plain dict, since copies of the whole are slow."""
    whole = compose.compose_config([PATH, VLLM])
    parts = whole.actor_rollout_ref
    plain = {name: options.as_builtin(parts[name]) for name in ("actor", "rollout", "model")}
    return {"actor_rollout_ref": plain | {"hybrid_engine": True}, "trainer": options.as_builtin(whole.trainer)}


def judged(stock: Any, *changes: tuple[str, Any]) -> list[str]:
    config = OmegaConf.create(stock)
    for key, value in changes:
        OmegaConf.update(config, key, value, force_add=True)
    part = config.actor_rollout_ref
    return [str(o) for o in options.objections(part.rollout, part.model, config, config.trainer.device)]


@needs_verl
def test_a_default_run_is_accepted_and_told_what_it_would_do() -> None:
    found = judge_run("verl", [PATH, VLLM, f"{SPEC}k=5"], a_qwen3)
    assert found.accepted and not found.unseen
    assert "up to 5 tokens" in found.facts["method"] and found.facts["shape"].startswith("8 fsdp actor ranks; 4 vllm")
    assert (
        "403M parameters" in found.facts["draft on the actor"]
        and "1.5 GiB each of weights, of optimizer state" in found.facts["draft on the actor"]
    )
    assert (
        "768 MiB" in found.facts["draft in the engine"] and "split over 2 ranks" in found.facts["draft in the engine"]
    )
    assert {"model runner", "CUDA graphs", "never run on a GPU", "verified", "not verified"} <= set(found.facts)


@needs_verl
def test_of_a_draft_that_is_served_as_it_is_the_run_is_told_what_each_of_its_layers_keeps(tmp_path: Path) -> None:
    config = {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "hidden_size": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 8, "head_dim": 128}))
    save_file({"fc.weight": torch.zeros(1 << 19)}, tmp_path / "model.safetensors")
    found = judge_run("verl", [PATH, VLLM, f"{SPEC}draft={tmp_path}", f"{SPEC}train=false"], a_qwen3)
    told = found.facts["draft in the engine"]
    assert told == "2 MiB of weights, split over 2 ranks, and the KV cache of 5 layers beside the target's 36"


ACCEPTED = (
    (f"{ROLLOUT}tensor_model_parallel_size", 8),
    ("actor_rollout_ref.actor.strategy", "fsdp2"),
    ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", 2),
    (f"{MODEL}use_remove_padding", True),
    ("actor_rollout_ref.actor.use_dynamic_bsz", True),
    ("actor_rollout_ref.actor.fsdp_config.param_offload", True),
    ("actor_rollout_ref.actor.fsdp_config.optimizer_offload", True),
    ("algorithm.adv_estimator", "remax"),
    (f"{ROLLOUT}val_kwargs.temperature", 0.6),
    (f"{ROLLOUT}multi_turn.enable", True),
    (f"{ROLLOUT}calculate_log_probs", False),
)


@needs_verl
@pytest.mark.parametrize("change", ACCEPTED, ids=lambda change: f"{change[0].rpartition('.')[2]}")
def test_this_is_no_objection(stock: Any, change: tuple[str, Any]) -> None:
    assert judged(stock, change) == []


@needs_verl
def test_merged_lora_is_no_objection(stock: Any) -> None:
    assert judged(stock, (f"{MODEL}lora_rank", 8), (f"{MODEL}lora.merge", True)) == []


KWARGS = f"{ROLLOUT}engine_kwargs.vllm"
REFUSED = (
    ((f"{ROLLOUT}name", "sglang"), "rollouts by sglang", "set it to vllm"),
    (("actor_rollout_ref.actor.strategy", "torchtitan"), "torchtitan actors", "fsdp or fsdp2 or veomni or megatron"),
    (
        ("trainer.v1.trainer_mode", "my_async"),
        "trainer mode my_async",
        "set it to sync, colocate_async or separate_async",
    ),
    (("trainer.v1.trainer_mode", "separate_async"), "both beside the actors and apart", "set it to False"),
    (("trainer.use_v1", False), "legacy trainer", "set it to True"),
    (("trainer.device", "npu"), "device npu", "cpu, cuda"),
    (("actor_rollout_ref.hybrid_engine", False), "outside of the actors' processes", "set it to True"),
    ((f"{ROLLOUT}pipeline_model_parallel_size", 2), "pipeline parallel", "set it to 1"),
    ((f"{ROLLOUT}data_parallel_size", 2), "engine data parallel", "set it to 1"),
    ((f"{ROLLOUT}expert_parallel_size", 2), "expert parallel engines", "set it to 1"),
    ((f"{KWARGS}.enable_expert_parallel", True), "expert parallel engines", "remove it"),
    ((f"{ROLLOUT}enable_rollout_routing_replay", True), "routes (R3)", "set it to False"),
    ((f"{ROLLOUT}disaggregation.enabled", True), "prefill-decode", "set it to False"),
    ((f"{ROLLOUT}quantization", "fp8"), "quantized rollouts", "set it to null"),
    ((f"{ROLLOUT}qat", {"enable": True}), "quantized rollouts", "qat.enable=False"),
    (
        (f"{ROLLOUT}checkpoint_engine.backend", "delta_sharded"),
        "weight syncs by delta_sharded",
        "set it to naive, or nccl",
    ),
    ((f"{ROLLOUT}dtype", "auto"), "dtypes that are not named", "bfloat16"),
    ((f"{ROLLOUT}name", "???"), "rollouts by None", "set it to vllm"),
    ((f"{ROLLOUT}tensor_model_parallel_size", "two"), "a whole number", "set one"),
    ((f"{MODEL}lora_rank", "many"), "a whole number", "set one"),
    ((f"{MODEL}mtp.enable", True), "MTP", "set it to False"),
    ((f"{KWARGS}.speculative_config", {"method": "ngram"}), "sets it too", "remove it"),
    ((f"{KWARGS}.data_parallel_size", 2), "engine data parallel", "remove it"),
    ((f"{KWARGS}.quantization", "fp8"), "quantized rollouts", "remove it"),
    ((f"{KWARGS}.tensor_parallel_size", 4), "another size than its replica", "remove it"),
)


@needs_verl
@pytest.mark.parametrize(("change", "what", "instead"), REFUSED, ids=lambda v: v[0] if isinstance(v, tuple) else "")
def test_an_objection_names_the_option_and_what_to_do(
    stock: Any, change: tuple[str, Any], what: str, instead: str
) -> None:
    (said,) = judged(stock, change)
    assert what in said and instead in said and change[0] in said


@needs_verl
def test_all_objections_are_reported_at_once() -> None:
    overrides = [
        "model_engine=megatron",
        "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=2",
        f"{ROLLOUT}pipeline_model_parallel_size=2",
        "trainer.v1.trainer_mode=separate_async",
    ]
    found = judge_run(
        "verl", [PATH, VLLM, *overrides, f"{SPEC}k=99"], lambda name: Model(name, {"model_type": "gemma3_text"}, "x")
    )
    said = "\n".join(map(str, found.objections))
    assert len(found.objections) == 5 and not found.accepted
    for part in (
        "virtual pipelines of Megatron actors",
        "pipeline parallel engines",
        "separate_async",
        "custom.spec.k=99",
        "Gemma3ForCausalLM",
    ):
        assert part in said


@needs_verl
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("actor_rollout_ref.actor.nonsense=3", "Could not override 'actor_rollout_ref.actor.nonsense'"),
        (f"+{MODEL}lora.merge=True", "already at 'actor_rollout_ref.model.lora.merge'"),
        (f"{SPEC[1:]}k=5", f"write {SPEC}k=…"),  # the + before an option of ours is forgotten
        ("spec.k=5", f"write {SPEC}k=…"),
        (f"{ROLLOUT}temprature=1", f"did you mean {ROLLOUT}temperature?"),
        ("unlike.anything=1", "To append to your config use +unlike.anything=1"),
        ("--spec.k=5", "unrecognized arguments: --spec.k=5"),
        ("--config-name", "expected one argument"),
    ],
)
def test_what_hydra_refuses_is_said_in_its_words_and_nothing_else_is_judged(given: str, said: str) -> None:
    found = judge_run("verl", [PATH, VLLM, given], a_qwen3)
    (objection,) = found.objections
    assert said in str(objection) and objection.by == "verl" and not found.facts
    assert found.unseen == ("everything else: verl would not get a configuration",)


@needs_verl
def test_all_options_that_hydra_does_not_know_are_named_at_once() -> None:
    wrong = [f"{ROLLOUT}temprature=1", "actor_rollout_ref.actor.nonsense=3", f"{SPEC[1:]}k=5"]
    found = judge_run("verl", [PATH, VLLM, *wrong, f"{ROLLOUT}n=many"], a_qwen3)
    meant = (f"did you mean {ROLLOUT}temperature?", "actor_rollout_ref.actor.nonsense", f"write {SPEC}k=…")
    assert len(found.objections) == len(meant)
    for objection, said in zip(found.objections, meant, strict=True):
        assert said in str(objection) and objection.by == "verl"


@needs_verl
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config-name=nowhere"], "Cannot find primary config 'nowhere'"),
        (["--config-path=nowhere"], "Primary config directory not found"),
        (["model_engine=nothing"], "nothing"),
        (["=3"], "Config group override must be a string"),
        ([VLLM, "trainer=null"], "trainer.v1"),
        ([VLLM, f"{KWARGS}=5"], f"{KWARGS}=5: verl expects a section"),
        ([VLLM, "trainer.project_name=${nope.x}"], "Interpolation key 'nope.x' not found"),
        ([VLLM, "trainer.project_name=${oc.env:NO_SUCH_VARIABLE}"], "'NO_SUCH_VARIABLE' not found"),
        ([VLLM, f"+{ROLLOUT}custom=7"], "expected options such as"),
        ([], "actor_rollout_ref.rollout.name"),
        (["-m", "verl.trainer.main_ppo_never", VLLM], "the trainer verl.trainer.main_ppo_never"),
        (["-m", "verl.trainer.main_ppo_v0", VLLM], "the trainer verl.trainer.main_ppo_v0"),
    ],
)
def test_what_verl_itself_would_stumble_over_is_an_objection_and_no_crash(arguments: list[str], said: str) -> None:
    found = judge_run("verl", arguments, a_qwen3)
    assert not found.accepted and any(said in str(o) for o in found.objections)


@pytest.mark.parametrize(
    "line",
    [("bash", "run.sh"), ("./run.sh", "trainer.nnodes=2"), ("NCCL_DEBUG=INFO", "sh", "run.sh"), ("python", "my.py")],
)
def test_a_script_is_not_judged_and_told_what_to_give_instead(line: tuple[str, ...]) -> None:
    with pytest.raises(SpecConfigError, match="write `echo` before the line") as refused:
        judge_run("verl", line, a_qwen3)
    assert " ".join(line) in str(refused.value)


@needs_verl
def test_the_configuration_may_be_chosen_as_verl_ships_them() -> None:
    found = judge_run("verl", ["--config-path=config", "--config-name=ppo_megatron_trainer.yaml", PATH, VLLM], a_qwen3)
    assert found.accepted, list(map(str, found.objections))
    assert "megatron actor ranks" in found.facts["shape"]


MEGATRON = "actor_rollout_ref.actor.megatron."


@needs_verl
@pytest.mark.parametrize(
    ("given", "what"),
    [
        (f"{MEGATRON}virtual_pipeline_model_parallel_size=2", "virtual pipelines of Megatron actors"),
        (f"{MEGATRON}dynamic_context_parallel=True", "dynamic context parallelism of Megatron actors"),
        (f"{MEGATRON}use_megatron_fsdp=True", "the FSDP of Megatron actors"),
        (f"+{MEGATRON}override_transformer_config.enable_cuda_graph=True", "CUDA graphs of Megatron actors"),
        (f"+{MEGATRON}override_transformer_config.fp8=hybrid", "8-bit training of Megatron actors"),
        (f"{MODEL}lora_rank=8", "LoRA in Megatron actors"),
        (f"{MEGATRON}router_replay.mode=R3", "the replay of the rollouts' routes (R3)"),
    ],
)
def test_what_a_megatron_actor_has_not_been_shown_to_do_is_refused_by_name(given: str, what: str) -> None:
    found = judge_run("verl", [PATH, VLLM, "model_engine=megatron", given, f"{MODEL}lora.merge=True"], a_qwen3)
    said = [str(o) for o in found.objections if o.by != "verl"]
    assert len(said) == 1 and what in said[0] and ": " in said[0], said


@needs_verl
@pytest.mark.parametrize("engine", ["megatron", "veomni"])
def test_the_replay_of_the_actors_own_routes_is_taken_and_that_of_the_rollouts_is_not(engine: str) -> None:
    """R2 replays in the update what the log-prob pass has recorded; the log-probs are those of either."""
    mode = f"actor_rollout_ref.actor.{engine}.router_replay.mode"
    assert judge_run("verl", [PATH, VLLM, f"model_engine={engine}", f"{mode}=R2"], a_qwen3).accepted
    both = (f"{mode}=R3", f"{ROLLOUT}enable_rollout_routing_replay=True")
    said = [str(o) for o in judge_run("verl", [PATH, VLLM, f"model_engine={engine}", *both], a_qwen3).objections]
    assert [mode in one or "enable_rollout_routing_replay" in one for one in said] == [True, True]
    assert all("nobody has shown" in one for one in said) and f"({mode}=R3): set it to R2" in "".join(said)


@needs_verl
def test_engine_kwargs_win_over_verls_own_options_and_none_is_not_given(stock: Any) -> None:
    config = OmegaConf.create(stock["actor_rollout_ref"]["rollout"])
    given = {"max_num_seqs": 32, "max_model_len": 4096, "dtype": "float32", "speculative_config": None}
    config.engine_kwargs = {"vllm": given, "sglang": None}
    target = options.target_info(config, "path", {})
    assert (target.max_num_seqs, target.max_model_len, target.dtype) == (32, 4096, "float32")
    config.engine_kwargs = {"vllm": None}
    assert options.target_info(config, "path", {}).max_num_seqs == config.max_num_seqs


@needs_verl
def test_the_engines_texts_are_as_long_as_verl_makes_them(stock: Any) -> None:
    """Where nobody asks: the model's positions, as ``override_config`` changes them; a draft is born as long."""
    config = OmegaConf.create({**stock["actor_rollout_ref"]["rollout"], "max_model_len": None})
    asked = OmegaConf.create({**config, "max_model_len": 32})
    longer = OmegaConf.create({"override_config": {"model_config": {"max_position_embeddings": 128}}})
    flat = OmegaConf.create({"override_config": longer.override_config.model_config})
    for hf in ({"max_position_embeddings": 64}, {"text_config": {"max_position_embeddings": 64}}):
        found = [
            options.target_info(rollout, "path", hf, of).length
            for rollout in (config, asked)
            for of in (None, longer, flat)
        ]
        assert found == [64, 128, 128, 32, 32, 32]
    assert options.target_info(config, "path", {}).max_model_len is None


@needs_verl
def test_lossy_engine_options_and_truncated_sampling_in_the_loss_are_refused() -> None:
    found = judge_run(
        "verl",
        [
            PATH,
            VLLM,
            f"+{KWARGS}.logits_processors=[x]",
            f"{ROLLOUT}top_p=0.9",
            f"+{ROLLOUT}repetition_penalty=1.1",
            "algorithm.rollout_correction.rollout_is=token",
        ],
        a_qwen3,
    )
    reasons = {o.reason for o in found.objections}
    assert reasons == {
        "a lossy option (logits_processors)",
        "a lossy option (repetition_penalty)",
        "truncated sampling whose log-probs enter the loss",
    }


@needs_verl
def test_log_probs_that_verl_does_not_ask_for_are_a_note() -> None:
    found = judge_run("verl", [PATH, VLLM, f"{ROLLOUT}calculate_log_probs=False"], a_qwen3)
    assert found.accepted and any("calculate_log_probs=False" in note for note in found.notes)


@needs_verl
@pytest.mark.parametrize(
    ("word", "plain"),
    [
        ("", True),
        ("+spec=off", True),
        ("+spec=on", False),
        ("actor_rollout_ref.model.external_lib=spec_plugin_verl", False),
        (options.EVERYWHERE, False),
    ],
)
def test_a_command_without_the_flag_is_judged_as_if_it_had_it_and_called_a_plain_run(word: str, plain: bool) -> None:
    found = judge_run("verl", [PATH, VLLM, *([word] if word else [])], a_qwen3)
    said = [note for note in found.notes if note.startswith("the flag is not among these arguments")]
    assert found.accepted and bool(said) == plain


def namespace(value: Any) -> Any:
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return SimpleNamespace(**{k: namespace(v) for k, v in value.items()})
    return value


@needs_verl
def test_verls_dataclasses_get_the_same_objections_and_the_run_raises_them(
    stock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = OmegaConf.create(stock)
    changes = (
        (f"{ROLLOUT}pipeline_model_parallel_size", 2),
        (f"{MODEL}mtp.enable", True),
        (f"{ROLLOUT}quantization", "fp8"),
    )
    for key, value in changes:
        OmegaConf.update(config, key, value)
    both = OmegaConf.to_container(config, resolve=True)["actor_rollout_ref"]  # type: ignore[index,call-overload]
    rollout, model = namespace(both["rollout"]), namespace(both["model"])
    rollout.engine_kwargs, rollout.qat, model.lora = {"vllm": {}}, {"enable": False}, {}
    expected = [str(o) for o in options.objections(config.actor_rollout_ref.rollout, config.actor_rollout_ref.model)]
    assert [str(o) for o in options.objections(rollout, model)] == expected and len(expected) == 3

    device = ModuleType("verl.utils.device")
    device.get_device_name = lambda: "cuda"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verl.utils.device", device)
    spec = importlib.util.spec_from_file_location("the_run", ROOT / "adapters/spec_plugin_verl/options.py")
    assert spec and spec.loader
    the_run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(the_run)  # by path: importing the package is the flag
    with pytest.raises(SpecConfigError) as refused:
        the_run.refuse_unsupported(rollout, model)
    assert str(refused.value) == "\n".join(expected) + f", or {options.LEAVE_OUT}"


@needs_verl
def test_adapters_in_the_engine_are_taken(stock: Any) -> None:
    assert judged(stock, (f"{MODEL}lora_rank", 8)) == []


@needs_verl
@pytest.mark.parametrize(
    ("change", "what", "instead"),
    [
        ((f"{MODEL}target_modules", ["q_proj", "lm_head"]), "of the embedding or the LM head", "remove them"),
        ((f"{ROLLOUT}checkpoint_engine.backend", "nccl"), "in engines apart from the actor", "model.lora.merge=True"),
    ],
)
def test_what_adapters_have_not_been_shown_to_do_is_refused(
    stock: Any, change: tuple[str, Any], what: str, instead: str
) -> None:
    (said,) = [said for said in judged(stock, (f"{MODEL}lora_rank", 8), change) if "adapter" in said]
    assert what in said and instead in said and change[0] in said


@needs_verl
@pytest.mark.parametrize(("load_format", "accepted"), [("dummy", False), ("auto", True)])
def test_a_pruned_vocabulary_that_the_engine_would_not_load(
    monkeypatch: pytest.MonkeyPatch, load_format: str, accepted: bool
) -> None:
    """verl's own load_format is dummy, and the installed vLLM's V2 runner loads drafts like that, too."""
    monkeypatch.setattr("spec_plugin.plan.model_runner.device_type", lambda: "cuda")
    found = judge_run(
        "verl", [PATH, VLLM, f"{SPEC}draft_vocab_size=1024", f"{ROLLOUT}load_format={load_format}"], a_qwen3
    )
    said = " ".join(map(str, found.objections))
    assert found.accepted == accepted and ("set the engine's load_format to auto" in said) != accepted


@needs_verl
@pytest.mark.parametrize(
    "modes",
    [
        {"trainer.v1.trainer_mode": "colocate_async"},
        {
            "trainer.v1.trainer_mode": "separate_async",
            "actor_rollout_ref.hybrid_engine": False,
            f"{ROLLOUT}checkpoint_engine.backend": "nccl",
        },
    ],
    ids=["colocate", "separate"],
)
def test_asynchronous_modes_are_taken(stock: Any, modes: dict[str, Any]) -> None:
    assert not judged(stock, *modes.items())


FULLY = ("-m", "verl.experimental.fully_async_policy.fully_async_main")
ONE_STEP = ("-m", "verl.experimental.one_step_off_policy.main_ppo")
APART = ("actor_rollout_ref.hybrid_engine=False", "rollout.nnodes=2")


@needs_verl
@pytest.mark.parametrize(("main", "mode"), [(FULLY, "fully_async"), (ONE_STEP, "one_step_off")])
def test_older_mains_are_taken_and_their_engines_counted(main: tuple[str, ...], mode: str) -> None:
    found = judge_run("verl", [*main, PATH, VLLM, *APART, "trainer.n_gpus_per_node=4"], a_qwen3)
    assert found.accepted, list(map(str, found.objections))
    assert found.facts["shape"].startswith(f"{mode}; 4 fsdp actor ranks; 8 vllm engines of 2")
    assert any(note.startswith(f"{mode}: rollouts lag") for note in found.notes)


@needs_verl
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*FULLY, *APART, "async_training.use_trainer_do_validate=True"), "both beside the actors and apart"),
        ((*FULLY, *APART, "async_training.use_dynamic_resource_scheduling=True"), "both beside the actors and apart"),
        ((*FULLY,), "hybrid_engine=True"),
        ((*ONE_STEP, *APART, "actor_rollout_ref.actor.strategy=torchtitan"), "torchtitan actors"),
        ((*FULLY, "--config-name=ppo_trainer", *APART), "Cannot find primary config"),
    ],
)
def test_what_older_mains_cannot_have_is_said(arguments: tuple[str, ...], said: str) -> None:
    found = judge_run("verl", [*arguments, PATH, VLLM], a_qwen3)
    assert not found.accepted and any(said in str(o) for o in found.objections), list(map(str, found.objections))


@needs_verl
def test_engines_apart_are_counted_from_the_rollouts_own_nodes() -> None:
    modes = ("trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.hybrid_engine=False")
    sizes = (f"{ROLLOUT}nnodes=3", f"{ROLLOUT}n_gpus_per_node=4", "trainer.n_gpus_per_node=4")
    found = judge_run("verl", [PATH, VLLM, *modes, *sizes], a_qwen3)
    assert found.facts["shape"].startswith("separate_async; 4 fsdp actor ranks; 6 vllm engines of 2")
