"""Never counts the policy's version up: actor and engine agree, and both are wrong."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter

CAUGHT_BY = "policy_versions_agree"


class Adapter(MinimalAdapter):
    def policy_version(self) -> int:
        return 0


class Driver(driver.Driver):
    adapter = "wrong_adapters.stale_version_number:Adapter"
