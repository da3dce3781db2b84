"""Counts policy versions from zero again when it goes on from a checkpoint."""

from __future__ import annotations

from pathlib import Path

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter

CAUGHT_BY = "save_kill_resume"
ONLY = True


class Adapter(MinimalAdapter):
    _resumed = 0

    def load(self, folder: Path) -> None:
        super().load(folder)
        self._resumed = self.step

    def policy_version(self) -> int:
        return self.step - self._resumed


class Driver(driver.Driver):
    adapter = "wrong_adapters.resumed_at_version_zero:Adapter"
