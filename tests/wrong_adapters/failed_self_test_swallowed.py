"""Goes on with an engine that the self-test has found wrong."""

from __future__ import annotations

import logging

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter

from spec_plugin import LosslessError

CAUGHT_BY = "failed_self_test_stops_the_run"


class Adapter(MinimalAdapter):
    def sync(self) -> None:
        try:
            super().sync()
        except LosslessError as error:
            logging.getLogger(__name__).warning("going on without speculation: %s", type(error).__name__)


class Driver(driver.Driver):
    adapter = "wrong_adapters.failed_self_test_swallowed:Adapter"
