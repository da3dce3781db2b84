"""How the conformance kit runs real OpenRLHF on a CPU: ``spec-plugin conformance openrlhf``."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from pathlib import Path
from typing import Any, ClassVar

import torch
from spec_plugin_conformance import calculator, tiny
from spec_plugin_conformance.driver import ConformanceDriver, RunSettings, option_word
from spec_plugin_conformance.targets import tiny_targets
from torch import Tensor

from spec_plugin_openrlhf_cpu.run import OpenRLHFRun
from spec_plugin_openrlhf_cpu.shims import RANDOM

_REPLAY = '''"""Written by spec_plugin_openrlhf_cpu.conformance: an agent that records rollouts, or gives back recorded ones."""
from pathlib import Path
from spec_plugin_openrlhf_cpu import replay


class AgentExecutor(replay.{executor}):
    folder, reward_file = {folder}, {reward!r}
'''
SAMPLES = 8
#: of a response, at most; and where rollouts are to last longer than training
TOKENS, LONG = 40, 80
#: of a prompt and all turns of its response, at most
TURNS = 128
_TWO_RANKS = ("--actor.num_gpus_per_node", "2")
_ASYNC = ("--train.async_enable",)
#: most requests that the engine runs at once, so that rollouts last longer than training, and a sync finds some in flight
_AT_ONCE = {"partial": 4}
#: name -> what it is, and OpenRLHF's flags
SHAPES = {
    "tp2": ("two tensor parallel ranks in the engine", ("--vllm.tensor_parallel_size", "2")),
    "dp2": ("two ranks of the actor, two engines", (*_TWO_RANKS, "--vllm.num_engines", "2")),
    "sleep": (
        "actor and engine on one card; the engine sleeps meanwhile, with garbage in the memory that a card would free",
        ("--train.colocate_all", "--vllm.enable_sleep"),
    ),
    "async": ("asynchronous: the next step's rollouts while the actor trains", _ASYNC),
    "partial": (
        "asynchronous with partial rollouts: those that a weight sync finds in flight go on under the next policy",
        (*_ASYNC, "--train.partial_rollout_enable", "--rollout.max_new_tokens", str(LONG)),
    ),
    "agent": (
        "an agent of the user's: an environment with a tool that the policy calls, and up to three turns a response",
        ("--data.max_len", str(TURNS)),
    ),
    "zero3": ("two ranks of the actor, ZeRO-3", (*_TWO_RANKS, "--ds.zero_stage", "3")),
    "job": ("one rank, one engine, by `ray job submit`", ()),
}


class OpenrlhfDriver(ConformanceDriver):
    """GRPO on one prompt with eight samples a step, so that a replayed run sees its rollouts in the same order."""

    shapes: ClassVar = {name: what for name, (what, _) in SHAPES.items()}
    takes_families = True
    adapter_modules = ("spec_plugin_openrlhf", "spec_plugin.lifecycle.session")
    trainer_modules = ("spec_plugin_openrlhf_cpu.stock",)
    engine_version = "spec_plugin.engine.front:EngineFront.policy_version"

    def __init__(self, root: Path, shape: str | None = None, family: str | None = None) -> None:
        """Write the tiny policy, the prompts and the reward under ``root``."""
        super().__init__(root, shape, family)
        self.asynchronous = shape in ("async", "partial")
        self._calls = shape == "agent"
        # of a response that goes on under the next policy, the rest
        most = {"partial": (1, LONG), "agent": (1, TURNS)}.get(shape or "", TOKENS)
        self.requests = {"min_tokens": 1, "max_tokens": most}
        root.mkdir(parents=True, exist_ok=True)
        self._tiny = tiny_targets()[family or "qwen3"]
        if self._calls:
            self._target = calculator.make_target(root / "policy", torch.bfloat16)
        else:
            self._target = tiny.make_target(root / "policy", torch.bfloat16, family=self._tiny.name)
        self._data = tiny.write_jsonl(root / "data.jsonl", 64)
        self._reward = tiny.write_reward(root)

    @property
    def target(self) -> Path:
        """Folder of the tiny policy, in bfloat16 as OpenRLHF computes."""
        return self._target

    def _checkpoints(self, run: RunSettings) -> Path:
        return (run.resume_from or run).out / "checkpoints"

    def _flags(self, run: RunSettings) -> list[str]:
        flags = ["--rollout.batch_size", "1", "--rollout.n_samples_per_prompt", str(SAMPLES)]
        flags += ["--rollout.micro_batch_size", "4", "--train.micro_batch_size", "4"]
        flags += ["--rollout.max_new_tokens", str(TOKENS)]
        flags += ["--data.max_samples", "64", "--actor.adam.lr", "1e-3", "--ckpt.path", str(self._checkpoints(run))]
        flags += ["--actor.lr_warmup_ratio", "0.0"]
        flags += SHAPES[self.shape][1] if self.shape else ()
        if run.save_every:
            flags += ["--ckpt.save_steps", str(run.save_every)]
        if run.resume_from:
            flags += ["--ckpt.load_enable"]
        if run.replay or self._calls:
            flags += ["--train.agent_func_path", str(self._agent(run.out, run.replay))]
        for name, value in run.options.items() if run.enabled else ():
            flags += [f"--spec.{name}", option_word(value)]
        return flags

    def _agent(self, out: Path, recorded: Path | None) -> Path:
        file = (recorded or out) / "agent.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = "None" if recorded is None else f"Path({str(recorded)!r})"
        executor = "ReplayTurns" if self._calls else "ReplayExecutor"
        file.write_text(_REPLAY.format(executor=executor, folder=kept, reward=str(self._reward)))
        return file

    def launch(self, run: RunSettings) -> Generator[tuple[int, dict[str, float]], None, None]:
        """One run of ``openrlhf.cli.train_ppo_ray``; killed after its last step, as its data would last longer."""
        trainer = OpenRLHFRun(
            self._target,
            self._data,
            self._reward,
            run.out,
            run.steps,
            plain=not run.enabled,
            overrides=tuple(self._flags(run)),
            variables=self._tiny.environment,
            submitted=self.shape == "job",
            max_num_seqs=_AT_ONCE.get(self.shape or ""),
        )
        for step, metrics in trainer.follow():
            yield step, metrics
            if step >= run.steps and (not run.save_every or step % run.save_every):
                return

    def policy(self, run: RunSettings, step: int) -> dict[str, Tensor]:
        """From DeepSpeed's checkpoint; of ZeRO-3 each rank's part, as the optimizer has it."""
        folder = self._checkpoints(run) / "_actor" / f"global_step{step}"
        if self.shape == "zero3":
            found: dict[str, Tensor] = {}
            for file in sorted(folder.glob("*_optim_states.pt")):
                groups = _load(file)["optimizer_state_dict"]["fp32_flat_groups"]
                found |= {f"{file.name} {i}": tensor for i, tensor in enumerate(groups)}
            return found
        state = _load(folder / "mp_rank_00_model_states.pt")["module"]
        return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}

    def weights(self, run: RunSettings, step: int) -> dict[str, Tensor] | None:
        """As ``policy``; None with ZeRO-3, whose ranks hold flat shards."""
        return None if self.shape == "zero3" else self.policy(run, step)

    def random_state(self, run: RunSettings, step: int) -> dict[str, str]:
        """sha256 of torch's random state on the first rank; OpenRLHF saves none, ``shims`` adds this one."""
        folder = self._checkpoints(run) / "_actor" / f"global_step{step}"
        file = next(iter(sorted(folder.glob("*mp_rank_00_model_states.pt"))))
        return {"torch": hashlib.sha256(_load(file)[RANDOM].numpy().tobytes()).hexdigest()}


def _load(file: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False)  # the run's own file
    return state
