"""An ordinary verl run on a CPU: its command line, its environment, and where it writes its steps."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from spec_plugin_conformance.launch import ENVIRONMENT, Launch, StepMetrics, Steps, follow
from spec_plugin_cpu.forks import Preloaded

HERE = Path(__file__).resolve().parent
PLUGIN_FLAG = "actor_rollout_ref.model.external_lib=spec_plugin_verl"
#: the same for verl's older mains, whose TaskRunner starts engines before it looks at the model's options
_EVERYWHERE = (
    '++ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES="spec_plugin_verl_cpu,spec_plugin_verl"'
)
#: before the name of an option of the plugin
SPEC = "+actor_rollout_ref.rollout.custom.spec."
#: what the processes of a run import: half of its time on two cores, if each does it
MODULES = (
    "torch",
    "transformers.models.auto.modeling_auto",
    "peft",
    "ray",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.worker.cpu_worker",
    "verl.trainer.main_ppo",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "verl.workers.engine_workers",
)
#: for a run on several Ray nodes: who joins a cluster must not say what it is made of
_JOIN = tuple(
    f"++ray_kwargs.ray_init.{name}=null"
    for name in ("num_cpus", "num_gpus", "include_dashboard", "object_store_memory")
)
#: tokens of a response, at most, in runs whose steps take a second; and overrides for those
SMALL_TOKENS = 40
SMALL = (
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    f"data.max_response_length={SMALL_TOKENS}",
)

_POLL = "trainer.v1.sampler.custom_sampler.name=FastPollAsync"
#: overrides for rollouts that are cut short for training, and go on under the next policy
COLOCATE = ("trainer.v1.trainer_mode=colocate_async", _POLL)
#: and for rollouts in processes of their own, which go on while the actor trains; a weight sync after each update
SEPARATE = (
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=file",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=spec_plugin_verl_cpu.file_sync",
    "++ray_kwargs.ray_init.num_gpus=2",
    _POLL,
)


@dataclass(frozen=True)
class Main:
    """One of verl's entry modules, and the overrides that it needs beside an ordinary run's."""

    module: str
    overrides: tuple[str, ...] = ()
    flag: str = PLUGIN_FLAG
    prompts: int = 0  # a step, where its rollouts are counted by prompts and not by steps

    def overrides_for(self, steps: int) -> tuple[str, ...]:
        """Hydra overrides of a run of so many steps."""
        counted = (f"rollout.total_rollout_steps={steps * self.prompts}",) if self.prompts else ()
        return (*self.overrides, *counted)


_APART = (
    "actor_rollout_ref.hybrid_engine=False",
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=file",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=spec_plugin_verl_cpu.file_sync",
    "++ray_kwargs.ray_init.num_gpus=2",
)
PPO = Main("verl.trainer.main_ppo")
#: each batch is sampled while the actor trains on the one before
ONE_STEP = Main(
    "verl.experimental.one_step_off_policy.main_ppo",
    ("hydra.searchpath=[pkg://verl.trainer.config]", *_APART),
    _EVERYWHERE,
)
#: prompts are sampled all the time, and cut short for each weight sync
FULLY = Main(
    "verl.experimental.fully_async_policy.fully_async_main",
    (
        *_APART,
        "data.train_batch_size=0",
        "data.gen_batch_size=1",
        "async_training.trigger_parameter_sync_step=1",
        "async_training.staleness_threshold=0.5",
        "ray_kwargs.ray_init.num_cpus=32",  # trainer and rollouter want ten each
    ),
    _EVERYWHERE,
    prompts=4,
)


@dataclass(frozen=True)
class Backend:
    """One of verl's training backends for the actor, with its overrides for a small machine."""

    overrides: tuple[str, ...]
    modules: tuple[str, ...] = ()  # that every process of verl imports


_ACTOR = "actor_rollout_ref.actor"
_MEGATRON = f"{_ACTOR}.megatron"
#: of Megatron's layers, what it takes by itself and a card alone has
CARDS_OWN = (
    "masked_softmax_fusion",
    "persist_layer_norm",
    "gradient_accumulation_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "apply_rope_fusion",
)
FSDP = Backend(
    (
        f"{_ACTOR}.strategy=fsdp2",
        # bfloat16 is slower than float32 on most CPUs
        f"+{_ACTOR}.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
        f"{_ACTOR}.use_torch_compile=False",
        f"{_ACTOR}.fsdp_config.use_torch_compile=False",
    )
)
#: padded batches of a fixed size
MEGATRON = Backend(
    (
        "model_engine=megatron",
        f"{_MEGATRON}.vanilla_mbridge=True",
        f"{_MEGATRON}.use_remove_padding=False",
        f"{_ACTOR}.use_dynamic_bsz=False",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=False",
        *(f"+{_MEGATRON}.override_transformer_config.{name}=False" for name in CARDS_OWN),
        f"{_MEGATRON}.override_transformer_config.attention_backend=unfused",
    ),
    ("spec_plugin_verl_cpu.megatron",),
)


_VEOMNI = f"{_ACTOR}.veomni"
#: two ranks at least: VeOmni leaves a single one without FSDP, and then wants a card
VEOMNI = Backend(
    (
        "model_engine=veomni",
        f"{_VEOMNI}.attn_implementation=sdpa",
        f"{_VEOMNI}.moe_implementation=eager",
        f"{_VEOMNI}.forward_prefetch=False",
    )
)


@dataclass(frozen=True)
class VerlRun:
    """One GRPO run of verl: what goes in and where its output lies."""

    policy: Path
    train_file: Path
    val_file: Path
    reward_file: Path  # with a function ``compute_score``
    out: Path
    steps: int
    plain: bool = False  # without the plugin's flag
    overrides: tuple[str, ...] = ()  # Hydra overrides, applied last
    nodes: int = 1  # Ray nodes, all on this machine
    main: Main = PPO
    backend: Backend = FSDP
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment, beside what a CPU needs
    first: tuple[str, ...] = ()  # modules that its processes import before all others

    @property
    def metrics_file(self) -> Path:
        """One JSON object a step, written by verl's ``file`` logger."""
        return self.out / "metrics.jsonl"

    @property
    def records(self) -> Steps:
        """The metrics file, and how a line of it becomes a step."""
        return Steps(self.metrics_file, step_record)

    def launch(self, base: Mapping[str, str] = os.environ) -> Launch:
        """What to start, with ``base`` as the environment that it inherits."""
        on_nodes = ("spec_plugin_verl_cpu.nodes", str(self.nodes)) if self.nodes > 1 else ()
        command = (sys.executable, "-m", *on_nodes, self.main.module, *arguments(self))
        # a forked process has imported verl already, and so does not look for the modules that this names
        more = ("spec_plugin_verl",) if self.main.flag == _EVERYWHERE and not self.plain else ()
        return Launch(
            command, environment(self, base), self.out, self.steps, "verl", Preloaded((*self.first, *MODULES, *more))
        )

    def follow(self) -> Generator[tuple[int, StepMetrics], None, None]:
        """Run it and yield (step, metrics); see :func:`spec_plugin_conformance.launch.follow`."""
        return follow(self.launch(), self.records)


def step_record(line: str) -> tuple[int, StepMetrics] | None:
    """Step and metrics of a line of ``metrics.jsonl``; None if it holds validation only."""
    record = json.loads(line)
    return (record["step"], record["data"]) if "training/global_step" in record["data"] else None


def arguments(run: VerlRun) -> list[str]:
    """The Hydra overrides: an ordinary GRPO run, what a CPU needs, and the one flag."""
    actor, rollout = _ACTOR, "actor_rollout_ref.rollout"
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
        f"{rollout}.name=vllm",
        f"{rollout}.n=8",
        f"{rollout}.max_model_len=128",
        f"{rollout}.max_num_seqs=32",
        f"{rollout}.max_num_batched_tokens=1024",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=32",
        f"reward.custom_reward_function.path={run.reward_file}",
        'trainer.logger=["console","file"]',
        "trainer.n_gpus_per_node=1",
        f"trainer.nnodes={run.nodes}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        f"trainer.total_training_steps={run.steps}",
        "trainer.total_epochs=1000",
        f"trainer.default_local_dir={run.out / 'checkpoints'}",
    ]
    small_machine = [
        "trainer.device=cpu",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{rollout}.dtype=float32",  # bfloat16 is slower on most CPUs
        f"{rollout}.tensor_model_parallel_size=1",
        # verl's own "mp" is one process more, and it spins on a core while it waits
        f"++{rollout}.engine_kwargs.vllm.distributed_executor_backend=uni",
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
    flag = [] if run.plain else [run.main.flag]
    joined = _JOIN if run.nodes > 1 else ()
    own = (*run.backend.overrides, *joined, *flag, *run.overrides, *run.main.overrides_for(run.steps))
    return [*grpo, *small_machine, *own]


def environment(run: VerlRun, base: Mapping[str, str]) -> dict[str, str]:
    """The process environment: a CPU platform for verl, quiet libraries, patient Ray. What the user set stays."""
    forced = {
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_FILE_LOGGER_PATH": str(run.metrics_file),
    }
    quiet = {"VERL_LOGGING_LEVEL": "WARNING"}  # at INFO, separate_async of 0.9.1 dies of logger.info(…, flush=True)
    modules = ",".join(("spec_plugin_verl_cpu", *run.backend.modules))
    defaults = {**ENVIRONMENT, **quiet, "VERL_USE_EXTERNAL_MODULES": modules, "HYDRA_FULL_ERROR": "1"}
    return {**defaults, **base, **run.variables, **forced}
