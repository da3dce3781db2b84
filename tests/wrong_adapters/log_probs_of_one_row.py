"""Shows the guard the engine's log-probs of one response, and says of the others that the trainer has none."""

from __future__ import annotations

from dataclasses import replace

import torch
from minimal_adapter import driver
from minimal_adapter.adapter import MinimalAdapter
from minimal_adapter.loop import Rollouts
from torch import Tensor

from spec_plugin.adapter import Responses

CAUGHT_BY = "logprobs_come_from_the_engine"


class Adapter(MinimalAdapter):
    def check(self, rollouts: Rollouts, recomputed: Tensor) -> None:
        shown = self.responses(rollouts)
        for rows, stated in ((slice(0, 1), shown.rollout), (slice(1, None), None)):
            self.spec.check(_rows(shown, rows, stated), recomputed[rows])


def _rows(of: Responses, rows: slice, stated: Tensor | None) -> Responses:
    assert of.told is not None
    told = torch.stack(of.told)[:, rows]
    parts = {
        "documents": of.documents[rows],
        "starts": of.starts[rows],
        "mask": of.mask[rows],
        "told": (told[0], told[1]),
    }
    return replace(of, **parts, rollout=None if stated is None else stated[rows])


class Driver(driver.Driver):
    adapter = "wrong_adapters.log_probs_of_one_row:Adapter"
