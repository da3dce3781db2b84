"""Asynchronous: stamps every token with the version that sampled the last one."""

from __future__ import annotations

from minimal_adapter import driver
from minimal_adapter.lagging import LaggingAdapter
from torch import Tensor

CAUGHT_BY = "policy_versions_agree"


class Adapter(LaggingAdapter):
    def versions(self, first: Tensor, last: Tensor, of_tokens: Tensor) -> dict[str, Tensor]:
        return super().versions(last, last, last[:, None].expand_as(of_tokens))


class Driver(driver.LaggingDriver):
    adapter = "wrong_adapters.span_of_the_wrong_end:Adapter"
