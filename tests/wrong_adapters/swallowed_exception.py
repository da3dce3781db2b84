"""Catches what must stop the run, and trains on."""

from __future__ import annotations

import logging
from typing import Any

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter

from spec_plugin import LogprobProvenanceError

CAUGHT_BY = "violations_stop_the_run"


class Adapter(MinimalAdapter):
    def check(self, *args: Any) -> None:
        try:
            super().check(*args)
        except LogprobProvenanceError as error:
            logging.getLogger(__name__).warning("log-probs are a little off, going on: %s", type(error).__name__)


class Driver(driver.Driver):
    adapter = "wrong_adapters.swallowed_exception:Adapter"
