"""Hands on rollout log-probs of another model than the one that sampled."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts
from torch import Tensor

CAUGHT_BY = "logprobs_are_the_targets"


class Adapter(MinimalAdapter):
    def check(self, rollouts: Rollouts, recomputed: Tensor) -> None:
        policy, self.policy = self.policy, copy.deepcopy(self.policy)
        try:
            with torch.no_grad():
                self.policy.lm_head.weight.mul_(0.7)
                other = self.policy_log_probs(rollouts)
        finally:
            self.policy = policy
        rows = [row[: len(r)].tolist() for row, r in zip(other, rollouts.responses, strict=True)]
        super().check(replace(rollouts, log_probs=rows), recomputed)


class Driver(driver.Driver):
    adapter = "wrong_adapters.logprobs_of_the_draft:Adapter"
