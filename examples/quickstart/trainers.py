"""What differs between the trainers: how the run is set up, and what they call the numbers of the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from spec_plugin_openrlhf_cpu.run import PLUGIN_FLAG as OPENRLHF_FLAG
from spec_plugin_openrlhf_cpu.run import PLUGIN_MODULE, OpenRLHFRun
from spec_plugin_trl_cpu.run import TrlCpuRun
from spec_plugin_verl_cpu.run import PLUGIN_FLAG as VERL_FLAG
from spec_plugin_verl_cpu.run import VerlRun

from examples.quickstart.data import build_data, build_openrlhf_data
from examples.quickstart.policy import PolicySettings

REWARD = Path(__file__).resolve().with_name("reward.py")
PROMPTS_PER_STEP, SAMPLES_PER_PROMPT = 12, 4
RATE = 1e-4  # of the policy: at 2e-4 one run of verl fell from 0.58 to 0.19 on its way
MICRO_BATCH = PROMPTS_PER_STEP * SAMPLES_PER_PROMPT // 2
#: A CPU computes tokens one after the other: already at 32 requests at once, each drafted token costs what a plain one does.
#: With 8, a step costs what it costs to go through the layers, as on a GPU.
MAX_NUM_SEQS = 8

Run = VerlRun | OpenRLHFRun | TrlCpuRun


@dataclass(frozen=True)
class Start:
    """What the user of the quickstart chose."""

    policy: Path
    data: Path  # folder for the prompts
    settings: PolicySettings
    out: Path
    steps: int
    plain: bool
    overrides: tuple[str, ...]
    prompts: int = 1024  # different ones; a run goes through them again and again


@dataclass(frozen=True)
class Trainer:
    """One trainer of the quickstart."""

    name: str
    flag: str  # what a user adds to a run of theirs
    metric_prefix: str  # before the plugin's metrics
    metric_names: Mapping[str, str]  # the report's name -> the trainer's
    run: Callable[[Start], Run]


def _verl(start: Start) -> VerlRun:
    train, val = build_data(start.data, start.settings, start.prompts)
    rollout = "actor_rollout_ref.rollout"
    actor = "actor_rollout_ref.actor"
    ours = (
        f"data.train_batch_size={PROMPTS_PER_STEP}",
        f"{actor}.ppo_mini_batch_size={PROMPTS_PER_STEP}",
        f"{actor}.optim.lr={RATE:g}",
        f"{actor}.ppo_micro_batch_size_per_gpu={MICRO_BATCH}",
        f"{rollout}.log_prob_micro_batch_size_per_gpu={MICRO_BATCH}",
        f"{rollout}.n={SAMPLES_PER_PROMPT}",
        f"{rollout}.max_num_seqs={MAX_NUM_SEQS}",
    )
    overrides = (*ours, *start.overrides)
    return VerlRun(start.policy, train, val, REWARD, start.out, start.steps, start.plain, overrides)


def _openrlhf(start: Start) -> OpenRLHFRun:
    epochs = -(-PROMPTS_PER_STEP * start.steps // start.prompts)  # OpenRLHF goes through the file once
    data = build_openrlhf_data(start.data, start.settings, start.prompts, epochs)
    ours: dict[str, float] = {
        "actor.adam.lr": RATE,
        "rollout.batch_size": PROMPTS_PER_STEP,
        "rollout.n_samples_per_prompt": SAMPLES_PER_PROMPT,
        "rollout.micro_batch_size": MICRO_BATCH,
        "train.micro_batch_size": MICRO_BATCH,
    }
    log = ("--logger.tensorboard_dir", str(start.out / "tensorboard"))  # what ``spec-plugin report`` reads
    overrides = (*log, *(word for name, n in ours.items() for word in (f"--{name}", str(n))), *start.overrides)
    return OpenRLHFRun(start.policy, data, REWARD, start.out, start.steps, start.plain, overrides, MAX_NUM_SEQS)


def _trl(start: Start) -> TrlCpuRun:
    data = build_openrlhf_data(start.data, start.settings, start.prompts)
    settings = {
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": PROMPTS_PER_STEP * SAMPLES_PER_PROMPT // MICRO_BATCH,
        "num_generations": SAMPLES_PER_PROMPT,
        "max_completion_length": 80,
        "vllm_max_model_length": 256,
        "learning_rate": RATE,
        "warmup_steps": min(3, start.steps),  # Adam's first steps are as long as its later ones
        "lr_scheduler_type": "constant_with_warmup",
    }
    return TrlCpuRun(
        start.policy,
        data,
        REWARD,
        start.out,
        start.steps,
        start.plain,
        start.overrides,
        MAX_NUM_SEQS,
        settings=settings,
    )


TRAINERS = {
    "verl": Trainer(
        name="verl",
        flag=VERL_FLAG,
        metric_prefix="actor/",
        metric_names={
            "reward": "critic/score/mean",
            "response_tokens": "response_length/mean",
            "generation_s": "timing_s/gen",
            "step_s": "timing_s/step",
            "entropy": "actor/entropy",
            "grad_norm": "actor/grad_norm",
        },
        run=_verl,
    ),
    "openrlhf": Trainer(
        name="OpenRLHF",
        flag=f"python -m {PLUGIN_MODULE} … {OPENRLHF_FLAG}",
        metric_prefix="",
        metric_names={
            "reward": "rollout/reward_mean",
            "response_tokens": "rollout/response_length_mean",
            "generation_s": "timing/generation",
            "step_s": "timing/step_total",
            "grad_norm": "actor_grad_norm",
        },
        run=_openrlhf,
    ),
    "trl": Trainer(
        name="TRL",
        flag="python -m spec_plugin_trl",
        metric_prefix="",
        metric_names={
            "reward": "reward",
            "response_tokens": "completions/mean_length",
            "generation_s": "generation_s",
            "step_s": "step_wall_s",
            "entropy": "entropy",
            "grad_norm": "grad_norm",
        },
        run=_trl,
    ),
}
