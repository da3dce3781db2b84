"""Starts verl for the quickstart and follows its metrics while it runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PLUGIN_FLAG = "actor_rollout_ref.model.external_lib=spec_plugin_verl"
START_FAILURES = ("node timed out", "raylet", "GCS", "Failed to register worker")
RAY_PREFIX = re.compile(r"\x1b\[\d+m|\((\w+ )?pid=[^)]*\) ?")
ERROR_LINE = re.compile(r"\s*(ERROR\b|[\w.]*(Error|Exception)\b[^\w])")

StepMetrics = dict[str, float]


@dataclass(frozen=True)
class Run:
    """One verl run: what goes in and where its output lies."""

    policy: Path
    train_file: Path
    val_file: Path
    out: Path
    steps: int
    plain: bool = False
    overrides: tuple[str, ...] = ()

    @property
    def metrics_file(self) -> Path:
        """One JSON object a step, written by verl's ``file`` logger."""
        return self.out / "metrics.jsonl"

    @property
    def log_file(self) -> Path:
        """Everything that verl, Ray and vLLM print."""
        return self.out / "verl.log"


def arguments(run: Run) -> list[str]:
    """The Hydra overrides: an ordinary GRPO run, what a CPU needs, and the one flag."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    grpo = [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={run.train_file}",
        f"data.val_files={run.val_file}",
        "data.train_batch_size=16",
        "data.max_prompt_length=24",
        "data.max_response_length=80",
        "data.seed=0",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={run.policy}",
        f"{actor}.optim.lr=2e-4",
        f"{actor}.optim.lr_warmup_steps=3",  # Adam's first steps are as long as its later ones
        f"{actor}.optim.weight_decay=0.0",
        f"{actor}.ppo_mini_batch_size=16",
        f"{actor}.ppo_micro_batch_size_per_gpu=32",
        f"{actor}.strategy=fsdp2",
        f"{rollout}.name=vllm",
        f"{rollout}.n=8",
        f"{rollout}.max_model_len=128",
        f"{rollout}.max_num_seqs=32",
        f"{rollout}.max_num_batched_tokens=1024",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=32",
        f"reward.custom_reward_function.path={HERE / 'reward.py'}",
        'trainer.logger=["console","file"]',
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        f"trainer.total_training_steps={run.steps}",
        "trainer.total_epochs=1000",
        f"trainer.default_local_dir={run.out / 'checkpoints'}",
    ]
    single_precision = [  # bfloat16 is slower than float32 on most CPUs
        f"{rollout}.dtype=float32",
        f"+{actor}.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
    ]
    small_machine = [
        "trainer.device=cpu",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.gpu_memory_utilization=0.1",
        f"{rollout}.enforce_eager=True",
        f"{rollout}.free_cache_engine=False",
        f"+{rollout}.enable_sleep_mode=False",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=32",
        f"{rollout}.agent.num_workers=1",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"trainer.v1.sampler.custom_sampler.path={HERE / 'fast_poll.py'}",
        "trainer.v1.sampler.custom_sampler.name=FastPoll",
        "ray_kwargs.ray_init.num_cpus=16",
        "+ray_kwargs.ray_init.num_gpus=1",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "+ray_kwargs.ray_init.object_store_memory=1000000000",
    ]
    flag = [] if run.plain else [PLUGIN_FLAG]
    return [*grpo, *single_precision, *small_machine, *flag, *run.overrides]


def environment(run: Run, base: Mapping[str, str]) -> dict[str, str]:
    """The process environment: a CPU platform for verl, quiet libraries, patient Ray. What the user set stays."""
    forced = {
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_FILE_LOGGER_PATH": str(run.metrics_file),
    }
    defaults = {
        "VERL_USE_EXTERNAL_MODULES": "spec_plugin_verl_cpu",
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_raylet_start_wait_time_s": "240",
        "RAY_raylet_client_connect_timeout_milliseconds": "20000",
        "PYTHONUNBUFFERED": "1",
    }
    return {**defaults, **base, **forced}


class RunFailed(RuntimeError):
    """verl stopped before its last step; the text holds the lines of its log that say why."""


def follow(run: Run) -> Generator[tuple[int, StepMetrics], None, None]:
    """Run verl to its end and yield (step, metrics) as each step completes. Ray's start is tried twice.

    Raises:
        RunFailed: if verl exits before the last step.
    """
    run.out.mkdir(parents=True, exist_ok=True)
    for attempt in (1, 2):
        done = 0
        run.metrics_file.unlink(missing_ok=True)
        for step, metrics in _follow_once(run):
            done = step
            yield step, metrics
        if done >= run.steps:
            return
        log = run.log_file.read_text(errors="replace")
        if done or attempt == 2 or not ray_failed_to_start(log):
            raise RunFailed(f"verl stopped after step {done} of {run.steps}\n{relevant_lines(log)}")


def ray_failed_to_start(log: str) -> bool:
    """Whether Ray missed its start limit, as it does on a loaded machine, rather than verl failing for a reason."""
    registered = "Failed to register worker" not in log
    started = "Started a local Ray instance" in log and registered
    return not started and any(mark in log for mark in START_FAILURES)


def _follow_once(run: Run) -> Generator[tuple[int, StepMetrics], None, None]:
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments(run)]
    with run.log_file.open("w") as log:
        process = subprocess.Popen(
            command, env=environment(run, os.environ), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        position = 0
        while True:
            running = process.poll() is None  # asked before reading, so that the last lines are not missed
            lines, position = read_lines(run.metrics_file, position)
            for line in lines:
                record = json.loads(line)
                if "training/global_step" in record["data"]:  # other records hold validation only
                    yield record["step"], record["data"]
            if not running:
                return
            time.sleep(0.2)
    finally:
        stop(process)


def read_lines(path: Path, position: int) -> tuple[list[str], int]:
    """The complete lines of a growing file after a byte position, and the position behind them."""
    if not path.exists():
        return [], position
    with path.open("rb") as file:
        file.seek(position)
        complete, newline, _ = file.read().rpartition(b"\n")
    return complete.decode().splitlines(), position + len(complete) + len(newline)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End verl with its process group; Ray's daemons and workers go down with the driver."""
    for sign, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
        if process.poll() is not None:
            break
        os.killpg(process.pid, sign)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue


def relevant_lines(log: str, most: int = 12) -> str:
    """The lines of a log that explain a failure.

    Returns:
        The first errors, each once, since what fails first is often the cause, and then the end of the last traceback.
    """
    lines = [RAY_PREFIX.sub("", line) for line in log.splitlines()]
    lines = [line for line in lines if line.strip()]
    errors = list(dict.fromkeys(line.strip() for line in lines if ERROR_LINE.match(line)))
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    tail = lines[starts[-1] :] if starts else lines
    return "\n".join(["first errors:", *errors[:4], "", "end of the log:", *tail[-most:]])
