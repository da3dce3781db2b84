"""How the conformance kit runs TRL on a CPU: ``spec-plugin conformance trl``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file
from spec_plugin_conformance import calculator, tiny
from spec_plugin_conformance.driver import ConformanceDriver, RunSettings, option_word
from torch import Tensor

from spec_plugin_trl_cpu.run import TrlCpuRun

SAMPLES, TOKENS = 8, 40
_HALVES = {"per_device_train_batch_size": SAMPLES // 2, "gradient_accumulation_steps": 2}
_RANKS = {"per_device_train_batch_size": SAMPLES // 2, "num_generations": SAMPLES // 2}
_ZERO_3 = {
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
}
_FSDP_2 = {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"], "state_dict_type": "FULL_STATE_DICT"}
#: name -> what it is, and fields of the configuration
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "skip": (
        "no importance-sampling correction: TRL does not recompute log-probs, the loss does",
        {**_HALVES, "vllm_importance_sampling_correction": False},
    ),
    "accumulate": ("two micro-batches an optimizer step", _HALVES),
    "iterations": (
        "each batch is trained on twice, and spans two optimizer steps",
        {"per_device_train_batch_size": SAMPLES // 2, "steps_per_generation": 2, "num_iterations": 2},
    ),
    "sleep": (
        "the engine sleeps meanwhile, with garbage in the memory that a card would free",
        {"vllm_enable_sleep_mode": True},
    ),
    "rloo": ("RLOOTrainer, which asks for no log-probs", {}),
    "peft": ("a LoRA adapter, which TRL merges before each weight sync", {}),
    "skip-peft": (
        "the same where TRL does not recompute log-probs, with a reference: the same model without its adapter",
        {**_HALVES, "vllm_importance_sampling_correction": False, "beta": 0.1},
    ),
    "tools": (
        "a tool that the policy calls, and whose answers stand in its responses",
        {"max_tool_calling_iterations": 2},
    ),
    "environment": (
        "the same where the tool is a method of an environment of the user's",
        {"max_tool_calling_iterations": 2},
    ),
    "rollouts": ("rollouts by a function of the user's, of two turns each", {}),
    "dp2": ("two ranks (DDP), each with an engine of its own", _RANKS),
    "zero3": ("two ranks, ZeRO-3", {**_RANKS, "deepspeed": _ZERO_3}),
    "fsdp2": ("two ranks, FSDP2", {**_RANKS, "fsdp": "full_shard", "fsdp_config": _FSDP_2}),
}


_OWN = "spec_plugin_trl_cpu.rollouts"
#: words of the script in these shapes
_WORDS = {
    "tools": ["--tools", f"{calculator.__name__}:{calculator.add.__name__}"],
    "environment": ["--environment", f"{_OWN}:Calculator"],
    "rollouts": ["--rollouts", f"{_OWN}:two_turns"],
}


class TrlDriver(ConformanceDriver):
    """GRPO on one prompt with eight samples a step."""

    shapes: ClassVar = {name: what for name, (what, _) in SHAPES.items()}
    adapter_modules = ("spec_plugin_trl.trainer", "spec_plugin_trl.registration", "spec_plugin.lifecycle.session")
    trainer_modules = ("trl.trainer.grpo_trainer", "vllm")
    engine_version = "spec_plugin.engine.front:EngineFront.policy_version"
    requests: Mapping[str, Any] = MappingProxyType({"max_tokens": TOKENS})

    def __init__(self, root: Path, shape: str | None = None) -> None:
        """Write the tiny policy, the prompts and the reward under ``root``."""
        super().__init__(root, shape)
        root.mkdir(parents=True, exist_ok=True)
        self._calls = shape in ("tools", "environment")
        self._target = _calls_a_tool(root / "policy") if self._calls else tiny.make_target(root / "policy")
        self._peft = shape in ("peft", "skip-peft")
        #: optimizer steps for each rollout phase, which is what the kit calls a step
        self._cycle = 4 if shape == "iterations" else 1
        self._data, self._reward = root / "data.jsonl", tiny.write_reward(root)
        asked = ([{"role": "user", "content": p}] if self._calls else p for p in tiny.prompts(64))
        self._data.write_text("".join(json.dumps({"prompt": p, "label": ""}) + "\n" for p in asked))

    @property
    def target(self) -> Path:
        """Folder of the tiny policy, in float32."""
        return self._target

    def _checkpoints(self, run: RunSettings) -> Path:
        return (run.resume_from or run).out / "checkpoints"

    def launch(self, run: RunSettings) -> Generator[tuple[int, dict[str, float]], None, None]:
        """One run of the script."""
        folder, words = self._checkpoints(run), []
        if run.resume_from:
            saved = [file.parent for file in folder.glob("checkpoint-*/trainer_state.json")]
            words += ["--resume", str(max(saved, key=lambda f: int(f.name.rpartition("-")[2])))]
        words += ["--trainer", "rloo"] if self.shape == "rloo" else ["--peft"] if self._peft else []
        words += _WORDS.get(self.shape or "", [])
        settings: dict[str, Any] = {
            "per_device_train_batch_size": SAMPLES,
            "num_generations": SAMPLES,
            "max_completion_length": TOKENS,
            "vllm_max_model_length": 256,
            "learning_rate": 1e-3,
            "temperature": 1.0,
            "output_dir": str(folder),
            **(SHAPES[self.shape][1] if self.shape else {}),
        }
        if run.save_every:
            settings |= {"save_strategy": "steps", "save_steps": run.save_every * self._cycle}
        trainer = TrlCpuRun(
            self._target,
            self._data,
            self._reward,
            run.out,
            run.steps * self._cycle,
            plain=not run.enabled,
            overrides=tuple(f"spec.{name}={option_word(value)}" for name, value in run.options.items()),
            words=tuple(words),
            ranks=2 if self.shape in ("dp2", "zero3", "fsdp2") else 1,
            replay=run.replay,
            settings=settings,
        )
        of_phase: dict[str, float] = {}
        for step, metrics in trainer.follow():
            of_phase |= metrics
            if step % self._cycle == 0:
                yield step // self._cycle, of_phase
                of_phase = {}

    def policy(self, run: RunSettings, step: int) -> dict[str, Tensor]:
        """What TRL saved: the model, or with PEFT the adapter."""
        folder = self._checkpoints(run) / f"checkpoint-{step * self._cycle}"
        file = folder / ("adapter_model.safetensors" if self._peft else "model.safetensors")
        found: dict[str, Tensor] = load_file(file)
        return found

    def weights(self, run: RunSettings, step: int) -> dict[str, Tensor] | None:
        """As ``policy``; None with PEFT, whose checkpoints have no merged weights."""
        return None if self._peft else self.policy(run, step)

    def random_state(self, run: RunSettings, step: int) -> dict[str, str]:
        """All of them: Python's, NumPy's and torch's, which transformers' Trainer saves, of the first rank."""
        folder = self._checkpoints(run) / f"checkpoint-{step * self._cycle}"
        file = next(iter(sorted(folder.glob("rng_state*.pth"))))
        state = torch.load(file, weights_only=False)  # the run's own file
        digests = {"torch": state["cpu"].numpy().tobytes()}
        digests |= {name: repr(state[name]).encode() for name in ("python", "numpy")}
        return {name: hashlib.sha256(content).hexdigest() for name, content in digests.items()}


def _calls_a_tool(folder: Path) -> Path:
    """A policy with TRL's own copy of Qwen3's template, by which TRL knows how to parse its calls.

    Raises:
        FileNotFoundError: if TRL is not installed.
    """
    found = find_spec("trl")
    if found is None or found.origin is None:
        raise FileNotFoundError("TRL is not installed here: its copy of Qwen3's chat template is needed")
    template = (Path(found.origin).parent / "chat_templates" / "qwen3.jinja").read_text()
    return calculator.make_target(folder, template=template)
