"""Writes a head into the draft after each refresh; the draft's head is the target's."""

from __future__ import annotations

from typing import Any

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.spec_worker import SpecWorker

CAUGHT_BY = "target_is_untouched_by_a_refresh"


class Adapter(MinimalAdapter):
    extension = "wrong_adapters.head_pushed_into_aliased_draft.Worker"


class Worker(SpecWorker):
    def spec_install_file(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        report = super().spec_install_file(*args, **kwargs)
        head = self.model_runner.drafter.model.lm_head.weight
        head.data.mul_(1 + 2**-17)  # so little that no log-prob tells
        return report


class Driver(driver.Driver):
    adapter = "wrong_adapters.head_pushed_into_aliased_draft:Adapter"
