"""Catches what must stop the run, and trains on."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts, Trainer
from torch import Tensor

from spec_plugin.adapter import SpecPluginError

CAUGHT_BY = "violations_stop_the_run"


class Adapter(MinimalAdapter):
    def check(self, *args: Any) -> None:
        try:
            super().check(*args)
        except SpecPluginError as error:
            logging.getLogger(__name__).warning("log-probs are a little off, going on: %s", type(error).__name__)

    def update(self, rollouts: Rollouts, old: Tensor, advantages: Tensor) -> float:
        loss = Trainer.update(self, rollouts, old, advantages)
        # else ``SpecRun`` ends the run here: nobody has checked what the update was made with
        with suppress(SpecPluginError):
            self.spec.policy_updated(self.step)
        return loss


class Driver(driver.Driver):
    adapter = "wrong_adapters.swallowed_exception:Adapter"
