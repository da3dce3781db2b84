"""Has the first row of each batch judged on its first token alone, and all of it enters the loss."""

from __future__ import annotations

from dataclasses import replace

from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts

from spec_plugin.adapter import Responses

CAUGHT_BY = "logprobs_come_from_the_engine"
ONLY = True


class Adapter(MinimalAdapter):
    def responses(self, rollouts: Rollouts) -> Responses:
        shown = super().responses(rollouts)
        mask = shown.mask.clone()
        mask[0, 1:] = False
        return replace(shown, mask=mask)


class Driver(driver.Driver):
    adapter = "wrong_adapters.one_row_judged_on_a_token:Adapter"
