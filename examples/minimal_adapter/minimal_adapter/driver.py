"""How the conformance kit runs this loop: one subprocess a run, a policy that is made in a second."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file
from spec_plugin_conformance import tiny
from spec_plugin_conformance.driver import ConformanceDriver, RunSettings
from spec_plugin_conformance.launch import Launch, Steps, follow
from torch import Tensor

from minimal_adapter.loop import Settings


class Driver(ConformanceDriver):
    """Runs ``python -m minimal_adapter``; a subclass may name another adapter."""

    adapter = "minimal_adapter.adapter:MinimalAdapter"
    adapter_modules = ("minimal_adapter.adapter", "minimal_adapter.spec_worker", "spec_plugin")
    trainer_modules = ("minimal_adapter.loop", "minimal_adapter.worker")
    engine_version = "minimal_adapter.loop:Engine.version"
    requests: Mapping[str, Any] = MappingProxyType({"max_tokens": Settings.max_tokens})

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._target = tiny.make_target(root / "target")

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
        tensors: dict[str, Tensor] = load_file(run.out / "checkpoints" / f"step_{step}" / "policy.safetensors")
        return tensors

    def random_state(self, run: RunSettings, step: int) -> dict[str, str]:
        """torch's, which is the only one that the loop saves."""
        state = torch.load(run.out / "checkpoints" / f"step_{step}" / "optimizer.pt", weights_only=True)["random"]
        return {"torch": hashlib.sha256(state.numpy().tobytes()).hexdigest()}


class PairDriver(Driver):
    """The same with two engines, which sample every other request each."""

    adapter = "minimal_adapter.pair:PairAdapter"

    def command(self, run: RunSettings) -> list[str]:
        return [*super().command(run), "--engines", "2"]


class LaggingDriver(Driver):
    """The same of an asynchronous trainer: responses are cut short by each weight sync, and go on under the next policy."""

    adapter = "minimal_adapter.lagging:LaggingAdapter"
    asynchronous = True
    requests: Mapping[str, Any] = MappingProxyType({"max_tokens": (Settings.max_tokens // 2, Settings.max_tokens)})


def _root(cls: type) -> str:
    """The folder from which a class's module is imported."""
    file = sys.modules[cls.__module__].__file__
    assert file is not None
    return str(Path(file).resolve().parents[cls.__module__.count(".")])


def _parse(line: str) -> tuple[int, dict[str, float]]:
    metrics = json.loads(line)
    return metrics.pop("step"), metrics
