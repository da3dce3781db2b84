"""Stamps each sequence with the policy version of the check, not with the one that sampled it."""

from __future__ import annotations

from dataclasses import replace

import torch
from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts
from torch import Tensor

from spec_plugin.events import LogprobBatch

CAUGHT_BY = "planted_errors_reach_the_guard"


class Adapter(MinimalAdapter):
    def batch(self, rollouts: Rollouts, recomputed: Tensor) -> LogprobBatch:
        now = torch.full((len(rollouts.responses),), self.control.policy_version)
        return replace(super().batch(rollouts, recomputed), rollout_versions=now)


class Driver(driver.Driver):
    adapter = "wrong_adapters.stamped_when_used:Adapter"
