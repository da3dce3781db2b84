"""Where a worker puts the tensors of a refresh, and what it says where one fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draft_training import fingerprint
from spec_plugin.engine.refresh.layout import Layout
from spec_plugin.engine.refresh.swap import HOST, copied, swap
from spec_plugin.engine.vllm import extension

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
def test_a_refresh_is_checked_beside_the_draft_where_there_is_room(
    free: int, ranks: int, place: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (asked.append(device), (free, 80_000))[1])
    assert extension._roomy_place(layout_on(GPU, 600, 400, ranks=ranks)) == place
    assert asked == [GPU]


def test_where_there_is_no_gpu_it_is_checked_on_the_host() -> None:
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
    found = copied(torch.ones(3), torch.device("meta"))
    assert torch.equal(found, torch.ones(3)) and found.device == HOST


def test_a_swap_says_in_which_phase_it_failed() -> None:
    served = {"w": torch.zeros(4)}
    slot = SimpleNamespace(
        name="w", parameter="w", live=lambda parameters: parameters["w"], shard=lambda whole, like: whole
    )
    layout: Any = SimpleNamespace(
        parameters=served, slots={"w": slot}, optional=frozenset(), canonical=lambda name: name
    )
    assert swap(layout, {"w": torch.ones(4)}, lambda tensors: served["w"].copy_(tensors[0][1])) is None
    before = fingerprint(served)

    def broken(_tensors: Any) -> None:
        served["w"][0] = 7
        raise OSError("torn")

    reason = swap(layout, {"w": torch.full((4,), 3.0)}, broken)
    assert reason == "OSError while loading: torn" and fingerprint(served) == before


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
