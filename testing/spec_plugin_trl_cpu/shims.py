"""What TRL and its engine need on a CPU; the package's docstring lists each symbol with its reason."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from spec_plugin_cpu import MAX_NUM_SEQS
from spec_plugin_cpu.repairs import compat
from spec_plugin_cpu.shims import Shims
from spec_plugin_cpu.sleeping import sleep_on_cpu

from spec_plugin_trl_cpu import DTYPE, REPLAY

shims = Shims("spec_plugin_trl_cpu", "install TRL with the pins of tools/requirements-trl.txt, or report this")
replace = shims.replace
_GENERATION = "trl.generation.vllm_generation"


def install() -> None:
    """Change everything that TRL and its engine need; safe to call again.

    Raises:
        PatchError: if a symbol is gone or no longer looks as expected.
    """
    sleep_on_cpu()
    # transformers restores a rank's optimizer to the device "cpu:0", which torch.load does not know
    torch.serialization.register_package(
        5, lambda _: None, lambda storage, place: storage if place[:4] == "cpu:" else None
    )
    compat.apply_live_weights()
    replace(
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        _eager,
        parameters=("self",),
        landmarks=("self.create_model_config()",),
    )
    replace(_GENERATION, "VLLMGeneration._iter_named_params", _then_packed, parameters=("self",))
    replace(_GENERATION, "VLLMGeneration.generate", _apart, parameters=("self", "prompts"))


def _eager(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.enforce_eager = True
        self.dtype = os.environ.get(DTYPE, "float32")
        if most := os.environ.get(MAX_NUM_SEQS):
            self.max_num_seqs = int(most)
        return original(self, *args, **kwargs)

    return create_engine_config


def _then_packed(original: Callable[..., Any]) -> Callable[..., Any]:
    def iter_named_params(self: Any) -> Iterator[Any]:
        yield from original(self)
        if self.mode == "colocate":  # whoever asks for the next one has loaded the last
            compat.repack(self.llm.llm_engine.model_executor.driver_worker.model_runner.model)

    return iter_named_params


def _apart(original: Callable[..., Any]) -> Callable[..., Any]:
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        trainers = torch.get_rng_state()
        torch.set_rng_state(getattr(self, "_engines_random_state", trainers))
        try:
            return _replayed(self, original, args, kwargs)
        finally:
            self._engines_random_state = torch.get_rng_state()
            torch.set_rng_state(trainers)

    return generate


def _replayed(self: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The n-th rollouts of the folder, if it has them, else sampled and recorded."""
    folder = os.environ.get(REPLAY)
    if not folder:
        return original(self, *args, **kwargs)
    number = self._replayed = getattr(self, "_replayed", -1) + 1
    file = Path(folder) / f"{self.accelerator.process_index}-{number}.json"
    if file.exists():
        return tuple(json.loads(file.read_text()))
    found = original(self, *args, **kwargs)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps([[list(row) for row in found[0]], [list(row) for row in found[1]], *found[2:]]))
    partial.rename(file)  # a kill in between leaves nothing that the next run would read
    return found
