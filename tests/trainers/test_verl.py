"""What the conformance kit does not ask of real verl: FSDP actor, vLLM engine, Ray, all on a CPU. A run takes a minute or two."""

from __future__ import annotations

from pathlib import Path

import pytest
from spec_plugin_verl_cpu import run as verl_run
from spec_plugin_verl_cpu.run import SMALL, SPEC, VerlRun

from examples.quickstart.data import build_data
from examples.quickstart.policy import PolicySettings, build_policy
from spec_plugin.conformance.launch import RunFailed, StepMetrics

pytestmark = pytest.mark.trainer

REWARD = Path(__file__).with_name("reward.py")
OWN_WORKER = "++actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend=mp"
UNREPAIRED = (
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config={spec_plugin:{skip_patches:[expand_kernel]}}"
)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, Path]:
    """A barely taught policy, its data, and a folder for the runs."""
    root = tmp_path_factory.mktemp("verl")
    settings = PolicySettings(steps=60)
    policy = build_policy(root / "policy", settings, show=False)
    train, val = build_data(root / "data", settings, train=64, val=8)
    return root, policy, train, val


def run(stage: tuple[Path, Path, Path, Path], name: str, steps: int, *overrides: str) -> list[StepMetrics]:
    """The metrics of each step of one verl run.

    Raises:
        RunFailed: if it stops early.
    """
    root, policy, train, val = stage
    verl = VerlRun(policy, train, val, REWARD, root / name, steps, overrides=(*SMALL, *overrides))
    return [metrics for _, metrics in verl.follow()]


def test_configuration_errors_appear_before_the_engine_starts(stage: tuple[Path, Path, Path, Path]) -> None:
    with pytest.raises(RunFailed, match="did you mean") as failed:
        run(stage, "misspelt", 1, f"{SPEC}train_shar=0.2")
    assert "SpecConfigError" in str(failed.value)
    log = (stage[0] / "misspelt" / "verl.log").read_text()
    assert "SpecHttpServer pid" not in log


def test_bypassed_logprobs_are_verified_and_a_pruned_draft_is_refreshed(
    stage: tuple[Path, Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes as a user has them: each imports for itself, and the engine's worker is one of its own."""
    monkeypatch.setattr(verl_run, "MODULES", ())
    more = ("algorithm.rollout_correction.bypass_mode=True", OWN_WORKER)
    metrics = run(stage, "bypass", 2, f"{SPEC}serve=always", f"{SPEC}draft_vocab_size=64", *more)
    assert all(0 < m["actor/spec/logprob_diff_mean"] < 1e-3 for m in metrics)
    assert metrics[-1]["actor/spec/harvest_tokens"] > 0 and metrics[-1]["actor/spec/failed"] == 0
    assert metrics[-1]["actor/spec/draft_version"] > 0 and metrics[-1]["actor/spec/refresh_refused"] == 0


def test_self_test_stops_a_run_on_an_engine_that_samples_wrongly(stage: tuple[Path, Path, Path, Path]) -> None:
    """vllm issue 55005 with its repair left out: the real fault that two trainers trained on silently."""
    with pytest.raises(RunFailed, match="LosslessError") as failed:
        run(stage, "unrepaired", 1, UNREPAIRED)
    assert "stopped after step 0" in str(failed.value)
