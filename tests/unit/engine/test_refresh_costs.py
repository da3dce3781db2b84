"""What a refresh takes in a worker: where its tensors are put, what crosses between host and device, and each phase's time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draft_training import fingerprint
from spec_plugin.engine import extension
from spec_plugin.engine.refresh.layout import Layout
from spec_plugin.engine.refresh.swap import HOST, Costs, Staging, swap

GPU = torch.device("cuda", 1)


def layout_on(device: torch.device, *sizes: int) -> Any:
    return SimpleNamespace(parameters={str(i): SimpleNamespace(device=device, nbytes=n) for i, n in enumerate(sizes)})


@pytest.mark.parametrize(("free", "place"), [(4000, GPU), (3999, HOST), (0, HOST)])
def test_a_refresh_is_staged_beside_the_draft_where_there_is_room(
    free: int, place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (asked.append(device), (free, 80_000))[1])
    assert extension._roomy_place(layout_on(GPU, 600, 400)) == place
    assert asked == [GPU]


def test_where_there_is_no_gpu_it_is_staged_on_the_host() -> None:
    assert extension._roomy_place(layout_on(HOST, 600)) == HOST
    assert extension._roomy_place(layout_on(torch.device("xpu", 0), 600)) == HOST
    assert extension._roomy_place(Layout({}, {}, problem="no draft")) == HOST


def test_what_does_not_fit_after_all_goes_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.Tensor.to

    def full(tensor: torch.Tensor, place: Any, **kwargs: Any) -> torch.Tensor:
        if torch.device(place).type == "meta":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(tensor, place, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", full)
    staging = Staging(1, torch.device("meta"))
    staging.add([("a", torch.ones(3))])
    assert staging.problem is None and torch.equal(staging.tensors["a"], torch.ones(3))
    assert staging.tensors["a"].device == HOST


def test_bytes_that_change_sides_are_counted() -> None:
    costs = Costs()
    costs.copied(torch.ones(10), HOST)
    assert costs.crossed == 0
    costs.copied(torch.ones(10), torch.device("meta"))  # stands for a GPU: another side than the host
    assert costs.crossed == 40
    costs.crossing(torch.ones(10, device="meta", dtype=torch.bfloat16), HOST)
    assert costs.crossed == 60
    costs.crossing(torch.ones(10, device="meta"), torch.device("meta"))
    assert costs.crossed == 60


def test_time_goes_to_the_phase_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 10.0, 14.0, 15.0])
    monkeypatch.setattr("spec_plugin.engine.refresh.swap.time.perf_counter", lambda: next(now))
    costs = Costs()
    for phase in ("staging", "", "checking", "staging", ""):
        costs.begin(phase)
    assert costs.seconds == {"staging": 3.0, "checking": 4.0}


def test_a_swap_says_its_phases_also_when_it_fails() -> None:
    served = {"w": torch.zeros(4)}
    slot = SimpleNamespace(
        name="w", parameter="w", live=lambda parameters: parameters["w"], shard=lambda whole, like: whole
    )
    layout: Any = SimpleNamespace(
        parameters=served, slots={"w": slot}, optional=frozenset(), canonical=lambda name: name
    )
    new = {"w": torch.ones(4)}
    costs = Costs()
    assert swap(layout, new, lambda tensors: served["w"].copy_(tensors[0][1]), costs=costs) is None
    costs.begin("")
    assert list(costs.seconds) == ["keeping the previous draft", "loading", "reading back"]
    assert all(seconds >= 0 for seconds in costs.seconds.values()) and costs.crossed == 0
    costs, before = Costs(), fingerprint(served)

    def broken(_tensors: Any) -> None:
        served["w"][0] = 7
        raise OSError("torn")

    reason = swap(layout, {"w": torch.full((4,), 3.0)}, broken, costs=costs)
    costs.begin("")
    assert reason == "OSError while loading: torn" and fingerprint(served) == before
    assert list(costs.seconds) == ["keeping the previous draft", "loading"]
