"""What a refresh takes in a worker: where its tensors are put, what crosses between host and device, and each phase's time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draft_training import fingerprint
from spec_plugin.engine import extension
from spec_plugin.engine.refresh.layout import Layout
from spec_plugin.engine.refresh.swap import HOST, Costs, Staging, _check_digest, swap

GPU = torch.device("cuda", 1)


def layout_on(device: torch.device, *sizes: int, ranks: int = 1) -> Any:
    """A draft of these bytes, of which each rank has its share."""
    own = {str(i): SimpleNamespace(device=device, nbytes=n // ranks) for i, n in enumerate(sizes)}
    slots = {str(i): SimpleNamespace(shape=(n // 2,), dtype=torch.bfloat16) for i, n in enumerate(sizes)}
    return SimpleNamespace(parameters=own, slots=slots)


@pytest.mark.parametrize(
    ("free", "ranks", "place"),
    [(4000, 1, GPU), (3999, 1, HOST), (0, 1, HOST), (2500, 4, GPU), (2499, 4, HOST)],
)
def test_a_refresh_is_staged_beside_the_draft_where_there_is_room(
    free: int, ranks: int, place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (asked.append(device), (free, 80_000))[1])
    assert extension._roomy_place(layout_on(GPU, 600, 400, ranks=ranks)) == place
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
    assert list(costs.seconds) == ["keeping the previous draft", "loading", "reading back", "making its fingerprint"]
    assert all(seconds >= 0 for seconds in costs.seconds.values()) and costs.crossed == 0
    costs, before = Costs(), fingerprint(served)

    def broken(_tensors: Any) -> None:
        served["w"][0] = 7
        raise OSError("torn")

    reason = swap(layout, {"w": torch.full((4,), 3.0)}, broken, costs=costs)
    costs.begin("")
    assert reason == "OSError while loading: torn" and fingerprint(served) == before
    assert list(costs.seconds) == ["keeping the previous draft", "loading"]


def test_law_5_weights_whose_fingerprint_cannot_be_made_are_taken_back() -> None:
    served = {"w": torch.zeros(4)}
    slot = SimpleNamespace(name="w", parameter="w", live=lambda p: p["w"], shard=lambda whole, like: whole)
    layout: Any = SimpleNamespace(
        parameters=served, slots={"w": slot}, optional=frozenset(), canonical=lambda name: name
    )
    votes: list[bool] = []

    def agree(mine: bool) -> bool:
        votes.append(mine)
        return mine

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    reason = swap(layout, {"w": torch.ones(4)}, lambda new: served["w"].copy_(new[0][1]), agree=agree, seal=full)
    assert reason == "OutOfMemoryError while making its fingerprint: CUDA out of memory" and votes == [False]
    assert not served["w"].any()


def test_a_sha256_takes_what_lies_on_a_gpu_to_the_host_and_a_fingerprint_does_not() -> None:
    counted = []
    for told in ("0" * 64, "f-0"):
        staging = Staging(1, tensors={"w": torch.ones(10)})
        staging.costs.crossing = lambda tensor, place: counted.append((tensor.nbytes, place))  # type: ignore[method-assign]
        assert "digest differs" in str(_check_digest(staging, told))
    assert counted == [(40, HOST)]
