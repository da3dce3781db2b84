"""Actors whose ranks each run all layers, over whole documents or slices of packed rows (Ulysses): FSDP and what extends it."""

from __future__ import annotations

from typing import Any

import torch

from spec_plugin.adapter import DecoderHarvest, PackedShards, SpecRun, find_decoder
from spec_plugin_verl import batches
from spec_plugin_verl.actor import SpecActor


class FsdpActor(SpecActor):
    """Mix-in for verl's ``FSDPEngineWithLMHead`` and its subclasses: each rank runs all layers."""

    use_ulysses_sp: bool
    ulysses_parallel_group: Any

    def spec_dtype(self) -> str:
        """verl's autocast dtype, in which its forward pass runs; bfloat16 where it names none."""
        return str(getattr(self, "_autocast_dtype", torch.bfloat16)).removeprefix("torch.")

    def spec_harvest(self, run: SpecRun) -> DecoderHarvest:
        """Hooks on the layers of the Hugging Face model."""
        shards = PackedShards(self.ulysses_parallel_group) if self.use_ulysses_sp else None
        return DecoderHarvest(run, lambda: find_decoder(self.module), shards)

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        """One micro-batch; captured while the pass still has harvest budget."""
        if not forward_only or self._run is None:
            return super().forward_step(micro_batch, loss_function, forward_only)  # type: ignore[misc]
        with self._run.micro_batch(lambda: batches.documents(micro_batch)):
            return super().forward_step(micro_batch, loss_function, forward_only)  # type: ignore[misc]
