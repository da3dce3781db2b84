"""An ordinary OpenRLHF run on a CPU: its command line, its environment, and where it writes its steps."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spec_plugin_conformance.launch import ENVIRONMENT, Launch, StepMetrics, Steps, follow, plain_line
from spec_plugin_cpu import MAX_NUM_SEQS
from spec_plugin_cpu.forks import Preloaded

PLUGIN_MODULE, PLAIN_MODULE = "spec_plugin_openrlhf", "openrlhf.cli.train_ppo_ray"
PLUGIN_FLAG = "--spec.enable"
#: what the processes of a run import; nothing of OpenRLHF: the shims must come before its modules take names from each other
MODULES = (
    "torch",
    "transformers.models.auto.modeling_auto",
    "peft",
    "datasets",
    "ray",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "deepspeed",
)
STEP = re.compile(r"Global step (\d+): (\{.*\})")
METRIC = re.compile(r"'([^']+)': (?:np\.float\d+\(|tensor\()?(-?(?:nan|inf|\d+\.?\d*(?:e[+-]?\d+)?))(?=[,)}])")


@dataclass(frozen=True)
class OpenRLHFRun:
    """One GRPO run of OpenRLHF: what goes in and where its output lies."""

    policy: Path
    data_file: Path  # JSON lines with a chat ``prompt`` and a text ``label``
    reward_file: Path  # with a function ``reward_func``
    out: Path
    steps: int
    plain: bool = False  # without the plugin
    overrides: tuple[str, ...] = ()  # flags and their values, in place of those below
    max_num_seqs: int | None = None  # most requests that the engine runs at once; OpenRLHF has no flag for it
    submitted: bool = False  # as a job, to a Ray cluster that runs already
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment, beside what a CPU needs

    @property
    def log_file(self) -> Path:
        """Output of OpenRLHF, Ray and vLLM, in one file."""
        return self.launch().log_file

    @property
    def records(self) -> Steps:
        """The log file, and how a line of it becomes a step."""
        return Steps(self.log_file, step_record)

    def launch(self, base: Mapping[str, str] = os.environ) -> Launch:
        """What to start, with ``base`` as the environment that it inherits."""
        module = PLAIN_MODULE if self.plain else PLUGIN_MODULE
        how = "spec_plugin_openrlhf_cpu.job" if self.submitted else "spec_plugin_openrlhf_cpu"
        command = (sys.executable, "-m", how, module, *arguments(self))
        interpreter = None if self.submitted else Preloaded(MODULES)  # a fork server knows of one job only
        return Launch(command, environment(self, base), self.out, self.steps, "openrlhf", interpreter)

    def follow(self) -> Generator[tuple[int, StepMetrics], None, None]:
        """Run it and yield (step, metrics); see :func:`spec_plugin_conformance.launch.follow`."""
        return follow(self.launch(), self.records)


def step_record(line: str) -> tuple[int, StepMetrics] | None:
    """Step and metrics of a line of the log; None if it is about something else."""
    found = STEP.search(plain_line(line))
    if not found:
        return None
    return int(found[1]), {name: float(value) for name, value in METRIC.findall(found[2])}


def arguments(run: OpenRLHFRun) -> list[str]:
    """The flags: an ordinary GRPO run, what a small machine needs, the plugin's flag, and the overrides in their place."""
    flags = {
        # what runs where: one actor, one engine, no reference model, rewards from a file
        "--actor.num_nodes": ("1",),
        "--actor.num_gpus_per_node": ("1",),
        "--vllm.num_engines": ("1",),
        "--vllm.tensor_parallel_size": ("1",),
        "--vllm.sync_backend": ("gloo",),
        "--vllm.enforce_eager": (),
        "--vllm.gpu_memory_utilization": ("0.1",),
        "--actor.model_name_or_path": (str(run.policy),),
        "--reward.remote_url": (str(run.reward_file),),
        # GRPO
        "--algo.advantage.estimator": ("group_norm",),
        "--algo.kl.init_coef": ("0.0",),
        "--data.prompt_dataset": (str(run.data_file),),
        "--data.input_key": ("prompt",),
        "--data.label_key": ("label",),
        "--data.apply_chat_template": (),
        "--data.max_len": ("128",),
        "--rollout.max_new_tokens": ("80",),
        "--rollout.batch_size": ("16",),
        "--rollout.n_samples_per_prompt": ("8",),
        "--rollout.micro_batch_size": ("32",),
        "--train.micro_batch_size": ("32",),
        "--actor.adam.lr": ("2e-4",),
        "--actor.lr_scheduler": ("constant_with_warmup",),
        # DeepSpeed, checkpoints
        "--ds.zero_stage": ("2",),
        "--ckpt.path": (str(run.out / "checkpoints"),),
        "--ckpt.output_dir": (str(run.out / "policy"),),
        **({} if run.plain else {PLUGIN_FLAG: ()}),
        **parse_flags(run.overrides),
    }
    prompts, samples = (int(flags[f"--rollout.{name}"][0]) for name in ("batch_size", "n_samples_per_prompt"))
    depends_on_steps = {
        "--train.batch_size": (str(prompts * samples),),  # one optimizer step per rollout phase
        "--data.max_samples": (str(prompts * run.steps),),  # the run ends with its data
        "--actor.lr_warmup_ratio": (f"{min(3, run.steps) / run.steps:.4f}",),  # Adam's first steps are long ones
    }
    return [word for name, values in {**depends_on_steps, **flags}.items() for word in (name, *values)]


def parse_flags(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Flags with their values, from a command line's words; ``--flag=value`` is taken too.

    Raises:
        ValueError: if the first word is no flag.
    """
    flags: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            flags[name] = (value,) if equals else ()
        elif not name:
            raise ValueError(f"{word!r}: expected a flag of OpenRLHF or of the plugin, such as --actor.adam.lr")
        else:
            flags[name] += (word,)
    return flags


def environment(run: OpenRLHFRun, base: Mapping[str, str]) -> dict[str, str]:
    """The process environment: DeepSpeed's CPU, quiet libraries, patient Ray. What the user set stays."""
    limit = {} if run.max_num_seqs is None else {MAX_NUM_SEQS: str(run.max_num_seqs)}
    return {**ENVIRONMENT, **limit, **base, **run.variables, "DS_ACCELERATOR": "cpu"}
