"""How the conformance kit runs this loop: one subprocess a run, a policy that is made in a second."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from spec_plugin.conformance.driver import ConformanceDriver, RunSettings
from spec_plugin.conformance.launch import Launch, Steps, follow

VOCAB = 320


class Driver(ConformanceDriver):
    """Runs ``python -m minimal_adapter``; a subclass may name another adapter."""

    adapter = "minimal_adapter.adapter:MinimalAdapter"
    adapter_modules = ("minimal_adapter.adapter", "minimal_adapter.spec_worker", "spec_plugin")
    trainer_modules = ("minimal_adapter.loop", "minimal_adapter.worker")

    def __init__(self, root: Path) -> None:
        """Make the tiny policy."""
        super().__init__(root)
        self._target = root / "target"
        if not (self._target / "config.json").exists():
            make_target(self._target)

    @property
    def target(self) -> Path:
        """Folder of the policy at version 0."""
        return self._target

    def launch(self, run: RunSettings) -> Generator[tuple[int, dict[str, float]], None, None]:
        """Start the loop and follow its ``metrics.jsonl``.

        Raises:
            RunFailed: if it ends before the last step.
        """
        command, environment = tuple(self.command(run)), self.environment()
        launch = Launch(command, environment, run.out, run.steps, "minimal_adapter")
        yield from follow(launch, Steps(run.out / "metrics.jsonl", _parse))

    def command(self, run: RunSettings) -> list[str]:
        """The command line of a run."""
        words = ["--target", self.target, "--out", run.out, "--steps", run.steps, "--save-every", run.save_every]
        if run.replay is not None:
            words += ["--replay", run.replay]
        if run.resume_from is not None:
            words += ["--resume", run.resume_from.out]
        if run.enabled:
            words += ["--spec", "--adapter", self.adapter]
            for name, value in run.options.items():
                words += [f"--spec.{name}", json.dumps(value)]
        return [sys.executable, "-m", "minimal_adapter", *map(str, words)]

    def environment(self) -> dict[str, str]:
        """Both this package and a subclass's must be importable, in the engine's process too."""
        roots = [_root(cls) for cls in type(self).__mro__ if issubclass(cls, Driver)]
        path = os.pathsep.join([*dict.fromkeys(roots), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

    def policy(self, run: RunSettings, step: int) -> dict[str, Tensor]:
        """The policy's parameters after a step."""
        tensors: dict[str, Tensor] = load_file(run.out / "checkpoints" / f"step_{step}" / "policy.safetensors")
        return tensors


def make_target(folder: Path) -> None:
    """A random Qwen3 of 8 layers (the least for EAGLE-3) that mostly says the current token + 37: sharp, so easy to draft for."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=8,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,  # vLLM's CPU attention refuses less
            max_position_embeddings=512,
            tie_word_embeddings=False,
            eos_token_id=0,
            pad_token_id=1,
            bos_token_id=None,
        )
        model = Qwen3ForCausalLM(config)
        embed = torch.nn.functional.normalize(torch.randn(VOCAB, 64), dim=-1)
    model.model.embed_tokens.weight.data = embed * 8
    model.lm_head.weight.data = embed.roll(37, 0).clone()  # row i + 37 points where token i does
    model.save_pretrained(folder)


def _root(cls: type) -> str:
    """The folder from which a class's module is imported."""
    file = sys.modules[cls.__module__].__file__
    assert file is not None
    return str(Path(file).resolve().parents[cls.__module__.count(".")])


def _parse(line: str) -> tuple[int, dict[str, float]]:
    metrics = json.loads(line)
    return metrics.pop("step"), metrics
