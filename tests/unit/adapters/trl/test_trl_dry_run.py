"""``spec-plugin check trl`` runs a script up to the line that makes the trainer, if it is asked to, and judges what that gets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from builders.waiting import wait_until
from spec_plugin_trl import options
from spec_plugin_trl.check import check

from spec_plugin.plan.run_plan import Model, RunPlan

# A stand-in for TRL, which a dry run imports from the folder that it is started in
FAKE_TRL = """
class GRPOConfig:
    def __init__(self, **given): vars(self).update(given)
class GRPOTrainer:
    def __init__(self, model, args=None): raise AssertionError("the dry run went on")
    def _generate_and_score_completions(self, inputs): ...
    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, batch_size=None): ...
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None): ...
    def _load_optimizer_and_scheduler(self, checkpoint): ...
    def _tool_call_loop(self, *turns): ...
"""
SCRIPT = "import sys\nfrom trl.trainer.grpo_trainer import GRPOConfig, GRPOTrainer\n"


@pytest.fixture
def dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], RunPlan]:
    """A dry run of a script with these lines."""
    package = tmp_path / "trl" / "trainer"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("")
    (package / "grpo_trainer.py").write_text(FAKE_TRL)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.setattr(options, "trl_version", lambda: "1.16.0")
    script = tmp_path / "train.py"

    def run(lines: str) -> RunPlan:
        script.write_text(SCRIPT + lines)
        words = ("python", str(script), "--name", "policy", "--spec.dry_run", "--spec.k", "5")
        return check(words, lambda name: Model(name, None, ""))

    return run


def test_a_dry_run_judges_the_configuration_that_the_trainer_gets(dry_run: Callable[[str], RunPlan]) -> None:
    """Also one that no flag says, nor a reader of the script could."""
    made = "GRPOTrainer(sys.argv[2], args=GRPOConfig(**dict(use_vllm={}, top_p=0.9, vllm_importance_sampling_correction=True)){})"
    plan = dry_run(made.format(True, ""))
    assert not plan.objections and not plan.unseen and plan.facts is not None
    assert plan.facts.model.name == "policy" and plan.facts.rollout_in_loss and plan.facts.target.truncated
    unsloth = "GRPOTrainer = type('Unsloth', (GRPOTrainer,), {'__module__': 'unsloth_cache'})\n"
    plan = dry_run(unsloth + made.format(False, ""))
    assert {o.option for o in plan.objections} == {"use_vllm", "trainer"}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("", "made no GRPOTrainer or RLOOTrainer"),
        ("sys.exit(3)", "ended before it made a trainer"),
    ],
)
def test_a_dry_run_that_makes_no_trainer_is_not_seen(dry_run: Callable[[str], RunPlan], lines: str, said: str) -> None:
    plan = dry_run(lines)
    assert not plan.objections and any(said in line for line in plan.unseen), plan.unseen


def test_a_dry_run_trains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from spec_plugin_trl import dry_run as dry

    module = ModuleType("transformers.trainer")
    module.Trainer = type("Trainer", (), {"train": lambda self: "trained"})  # type: ignore[attr-defined]
    dry._no_training(module)
    with pytest.raises(SystemExit, match="it trains a Trainer before it makes a GRPOTrainer"):
        module.Trainer().train()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_check_that_is_killed_leaves_no_script_behind(dry_run: Callable[[str], RunPlan], tmp_path: Path) -> None:
    """As a shell's time limit kills it, which lets nobody clean up; a script may load a model of many gigabytes."""
    (script, said) = tmp_path / "sleeps.py", tmp_path / "pid"
    script.write_text(
        f"import os, pathlib, time\npathlib.Path({str(said)!r}).write_text(f'{{os.getpid()}} ')\ntime.sleep(99)"
    )
    asked = [
        sys.executable,
        "-m",
        "spec_plugin.commands",
        "check",
        "trl",
        "--",
        "python",
        str(script),
        "--spec.dry_run",
    ]
    command = subprocess.Popen(asked)
    try:
        assert wait_until(lambda: said.exists() and said.read_text().endswith(" "), 60)
    finally:
        command.kill()
        command.wait()
    script_process = Path("/proc") / said.read_text().strip()
    assert wait_until(lambda: not script_process.exists() or ") Z " in (script_process / "stat").read_text())
