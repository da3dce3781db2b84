"""Draws the sequences that it harvests from the trainer's own random stream."""

from __future__ import annotations

import torch
from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts
from torch import Tensor

CAUGHT_BY = "random_streams_are_untouched"


class Adapter(MinimalAdapter):
    def documents(self, rollouts: Rollouts) -> tuple[list[Tensor], list[Tensor]]:
        documents, masks = super().documents(rollouts)
        torch.randperm(len(documents))
        return documents, masks


class Driver(driver.Driver):
    adapter = "wrong_adapters.random_numbers_consumed:Adapter"
