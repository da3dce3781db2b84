"""The laws in real verl: FSDP actor, vLLM engine, Ray, all on a CPU. Each run takes about a minute, mostly start-up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from spec_plugin_verl_cpu.run import SMALL, SPEC, VerlRun

from examples.quickstart.data import build_data
from examples.quickstart.policy import PolicySettings, build_policy
from spec_plugin.conformance.launch import RunFailed, StepMetrics

pytestmark = pytest.mark.trainer

REWARD = Path(__file__).with_name("reward.py")
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


def run(
    stage: tuple[Path, Path, Path, Path], name: str, steps: int, *overrides: str, plain: bool = False
) -> list[StepMetrics]:
    """The metrics of each step of one verl run.

    Raises:
        RunFailed: if it stops early.
    """
    root, policy, train, val = stage
    verl = VerlRun(policy, train, val, REWARD, root / name, steps, plain, (*SMALL, *overrides))
    return [metrics for _, metrics in verl.follow()]


def replay(root: Path) -> tuple[str, ...]:
    """verl's own option: the first run records its rollouts, later ones train on the same."""
    return (
        "skip.rollout_tq.enable=True",
        "skip.rollout_tq.steps=[1,2,3]",
        f"skip.rollout_tq.dump_dir={root / 'rollouts'}",
    )


def parameters(root: Path, name: str, step: int) -> dict[str, torch.Tensor]:
    """The policy as verl saved it."""
    file = root / name / "checkpoints" / f"global_step_{step}" / "actor" / "model_world_size_1_rank_0.pt"
    state = torch.load(file, weights_only=False)  # verl's own checkpoint of this very test
    return {k: getattr(v, "_local_tensor", v) for k, v in state.items()}


@pytest.fixture(scope="module")
def speculative(stage: tuple[Path, Path, Path, Path]) -> list[StepMetrics]:
    """Three GRPO steps with the flag; speculation from the first."""
    return run(stage, "speculative", 3, f"{SPEC}serve=always", "trainer.save_freq=2", *replay(stage[0]))


def test_configuration_errors_appear_before_the_engine_starts(stage: tuple[Path, Path, Path, Path]) -> None:
    with pytest.raises(RunFailed, match="did you mean") as failed:
        run(stage, "misspelt", 1, f"{SPEC}train_shar=0.2")
    assert "SpecConfigError" in str(failed.value)
    log = (stage[0] / "misspelt" / "verl.log").read_text()
    assert "SpecHttpServer pid" not in log


def test_one_flag_rolls_out_trains_and_refreshes_a_draft(speculative: list[StepMetrics]) -> None:
    first, last = speculative[0], speculative[-1]
    assert len(speculative) == 3
    assert all(m["actor/spec/failed"] == 0 and m["actor/spec/on"] == 1 for m in speculative)
    assert [m["actor/spec/policy_version"] for m in speculative] == [0, 1, 2]
    assert first["actor/spec/draft_version"] == 0 < last["actor/spec/draft_version"]
    assert last["actor/spec/draft_loss"] < first["actor/spec/draft_loss"]
    assert last["actor/spec/acceptance_length"] > first["actor/spec/acceptance_length"] + 0.1
    assert last["actor/spec/harvest_tokens"] > 0 and last["actor/spec/refresh_refused"] == 0


def test_rollout_logprobs_are_confirmed_by_the_actor_at_every_step(speculative: list[StepMetrics]) -> None:
    for metrics in speculative:
        assert 0 < metrics["actor/spec/logprob_diff_mean"] < metrics["actor/spec/logprob_tolerance"] == 1e-3
        assert metrics["actor/spec/versions_known"] == 1


def test_policy_is_bitwise_equal_with_and_without_the_plugin(
    stage: tuple[Path, Path, Path, Path], speculative: list[StepMetrics]
) -> None:
    assert len(speculative) == 3  # its rollouts are recorded; both runs below train on them
    options = ("trainer.save_freq=2", *replay(stage[0]))
    trained = run(stage, "replayed", 3, f"{SPEC}serve=always", *options)
    plain = run(stage, "plain", 3, *options, plain=True)
    assert trained[-1]["actor/spec/draft_version"] > 0  # a draft was trained beside the policy
    assert not [name for name in plain[-1] if "spec/" in name]  # law 1: off is off
    with_plugin, without = (parameters(stage[0], name, 3) for name in ("replayed", "plain"))
    start = parameters(stage[0], "replayed", 2)
    assert with_plugin.keys() == without.keys() and len(without) > 50
    assert [n for n in without if not torch.equal(with_plugin[n], without[n])] == []
    assert any(not torch.equal(start[n], without[n]) for n in without)  # it did move


def test_a_resumed_run_goes_on_with_the_same_draft(
    stage: tuple[Path, Path, Path, Path], speculative: list[StepMetrics]
) -> None:
    saved = stage[0] / "speculative" / "checkpoints" / "global_step_2"
    assert (saved / "actor" / "spec_plugin" / "draft").is_dir()
    options = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}")
    resumed = run(stage, "resumed", 3, f"{SPEC}serve=always", *options)
    assert len(resumed) == 1
    assert resumed[0]["actor/spec/draft_version"] == speculative[2]["actor/spec/draft_version"]
    assert resumed[0]["actor/spec/acceptance_length"] > speculative[0]["actor/spec/acceptance_length"] + 0.1


def test_bypassed_logprobs_are_verified_and_a_pruned_draft_is_refreshed(stage: tuple[Path, Path, Path, Path]) -> None:
    bypass = "algorithm.rollout_correction.bypass_mode=True"
    metrics = run(stage, "bypass", 2, f"{SPEC}serve=always", f"{SPEC}draft_vocab_size=64", bypass)
    assert all(0 < m["actor/spec/logprob_diff_mean"] < 1e-3 for m in metrics)
    assert metrics[-1]["actor/spec/harvest_tokens"] > 0 and metrics[-1]["actor/spec/failed"] == 0
    assert metrics[-1]["actor/spec/draft_version"] > 0 and metrics[-1]["actor/spec/refresh_refused"] == 0


def test_self_test_stops_a_run_on_an_engine_that_samples_wrongly(stage: tuple[Path, Path, Path, Path]) -> None:
    """vllm issue 55005 with its repair left out: the real fault that two trainers trained on silently."""
    with pytest.raises(RunFailed, match="LosslessError") as failed:
        run(stage, "unrepaired", 1, UNREPAIRED)
    assert "stopped after step 0" in str(failed.value)


def test_corrupt_logprobs_stop_a_run_before_they_enter_the_loss(stage: tuple[Path, Path, Path, Path]) -> None:
    with pytest.raises(RunFailed, match="LogprobProvenanceError") as failed:
        run(stage, "untested", 1, UNREPAIRED, f"{SPEC}self_test=False", f"{SPEC}serve=always")
    assert "stopped after step 0" in str(failed.value) and "sequence" in str(failed.value)
