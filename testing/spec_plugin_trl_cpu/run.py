"""An ordinary TRL run on a CPU: its command line, its environment, and where it writes its steps."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from spec_plugin_conformance.launch import ENVIRONMENT, Launch, StepMetrics, Steps, follow, free_port
from spec_plugin_cpu import MAX_NUM_SEQS
from spec_plugin_cpu.forks import Preloaded

from spec_plugin_trl_cpu import REPLAY, SWITCH

OPTIONS = "SPEC_PLUGIN_TRL"
SCRIPT = Path(__file__).with_name("script.py")
#: what the processes of a run import
MODULES = (
    "torch",
    "transformers.models.auto.modeling_auto",
    "datasets",
    "accelerate",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "trl.trainer.grpo_trainer",
    "trl.trainer.rloo_trainer",
)


@dataclass(frozen=True)
class TrlCpuRun:
    """One run of ``script.py``: what goes in and where its output lies."""

    policy: Path
    data_file: Path  # JSON lines with ``prompt`` and ``label``
    reward_file: Path  # with a function ``compute_score``
    out: Path
    steps: int
    plain: bool = False  # without the plugin
    overrides: tuple[str, ...] = ()  # NAME=JSON, fields of the configuration, and spec.NAME=VALUE
    max_num_seqs: int | None = None  # most requests that the engine runs at once; TRL has no setting for it
    words: tuple[str, ...] = ()  # further arguments of the script
    ranks: int = 1
    launcher: tuple[str, ...] = ()  # of several ranks, in the place of torchrun
    replay: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # fields of the configuration

    @property
    def records(self) -> Steps:
        """The file of steps, and how a line of it is read."""
        return Steps(self.out / "metrics.jsonl", step_record)

    def launch(self, base: Mapping[str, str] = os.environ) -> Launch:
        """What to start, with ``base`` as the environment that it inherits."""
        ours = [word.removeprefix("spec.") for word in self.overrides if word.startswith("spec.")]
        theirs = [word for word in self.overrides if not word.startswith("spec.")]
        given = [f"{name}={json.dumps(value)}" for name, value in self.settings.items()]
        words = ["--model", self.policy, "--data", self.data_file, "--reward", self.reward_file, "--out", self.out]
        words += ["--steps", self.steps, *self.words, "--set", *given, *theirs]
        port = str(free_port())
        torchrun = ("-m", "torch.distributed.run", "--master_port", port, "--nproc_per_node", str(self.ranks))
        ranks = self.launcher or torchrun
        by = ("-m", "spec_plugin_trl_cpu") if "deepspeed" in self.settings else ()
        flag = () if self.plain else ("-m", "spec_plugin_trl")
        command = (sys.executable, *(ranks if self.ranks > 1 else ()), *flag, *by, str(SCRIPT), *map(str, words))
        env = {**ENVIRONMENT, **base, SWITCH: "1", "TRL_EXPERIMENTAL_SILENCE": "1", "MASTER_PORT": port}
        env |= {"DS_ACCELERATOR": "cpu"} if by else {}
        env |= {OPTIONS: " ".join(ours)}
        if self.max_num_seqs is not None:
            env[MAX_NUM_SEQS] = str(self.max_num_seqs)
        if self.replay is not None:
            env[REPLAY] = str(self.replay)
        again = partial(self.launch, base)
        return Launch(command, env, self.out, self.steps, "trl", Preloaded(MODULES), again)

    def follow(self) -> Generator[tuple[int, StepMetrics], None, None]:
        """Run it and yield (step, metrics); see :func:`spec_plugin_conformance.launch.follow`."""
        return follow(self.launch(), self.records)


def step_record(line: str) -> tuple[int, StepMetrics]:
    """Step and metrics of a line of ``metrics.jsonl``."""
    metrics = json.loads(line)
    step = int(metrics.pop("step"))
    return step, {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
