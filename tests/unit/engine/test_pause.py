"""The pause on both of vLLM's model runners. Of V2 its own classes are asked here; it runs in tests/engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spec_plugin.api.errors import PatchError
from spec_plugin.engine.vllm.schedule.pause import pause_draft

pytest.importorskip("vllm")


def a_speculator(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[int]]:
    """An EAGLE speculator of vLLM's V2 runner, whose ``propose`` notes that it ran; its signature stays."""
    from vllm.v1.worker.gpu.spec_decode.autoregressive.speculator import AutoRegressiveSpeculator

    calls: list[int] = []
    original = AutoRegressiveSpeculator.propose

    def propose(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(input_batch.num_reqs)
        return self.draft_tokens[: input_batch.num_reqs] + 1

    propose.__signature__ = __import__("inspect").signature(original)  # type: ignore[attr-defined]
    monkeypatch.setattr(AutoRegressiveSpeculator, "propose", propose)
    kind = type("Speculator", (AutoRegressiveSpeculator,), {"load_draft_model": None})
    speculator = object.__new__(kind)
    speculator.draft_tokens = torch.arange(12).view(4, 3)
    return speculator, calls


def arguments(**more: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """As vLLM's V2 runner calls ``propose``."""
    return (SimpleNamespace(num_reqs=2), *[None] * 10), {"dp_sync": None, "mm_inputs": None} | more


def test_a_paused_speculator_of_the_v2_runner_runs_no_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    speculator, calls = a_speculator(monkeypatch)
    runner = SimpleNamespace(speculator=speculator)
    positional, named = arguments()
    assert speculator.propose(*positional, **named).tolist() == [[1, 2, 3], [4, 5, 6]] and calls == [2]
    assert pause_draft(runner, True)
    assert speculator.propose(*positional, **named).tolist() == [[0, 1, 2], [3, 4, 5]] and calls == [2]
    positional, named = arguments(dummy_run=True)
    speculator.propose(*positional, **named)
    assert calls == [2, 2]  # warm-up is no rollout
    assert pause_draft(runner, False) and "propose" not in vars(speculator)
    speculator.propose(*positional, **named)
    assert calls == [2, 2, 2]


@pytest.mark.parametrize(("asked", "served"), [(2, True), (0, False), (None, False)])
def test_a_step_that_asks_for_drafts_gets_them_where_vllm_says_how_many(asked: int | None, served: bool) -> None:
    """As of vLLM 0.32, which hands k on; before, nothing does."""

    class Speculator:
        draft_tokens = torch.zeros(2, 3)

        def propose(
            self, input_batch: object, dummy_run: bool = False, num_speculative_tokens: int | None = None
        ) -> str:
            return "drafts"

    speculator = Speculator()
    assert pause_draft(SimpleNamespace(speculator=speculator), True)
    found = speculator.propose(SimpleNamespace(num_reqs=1), num_speculative_tokens=asked)
    assert (found == "drafts") if served else (found.shape == (1, 3))


def test_the_v2_runner_has_what_the_pause_reads() -> None:
    """Tells when vLLM has moved on: the speculator's own source hands out ``draft_tokens`` of ``num_reqs`` requests."""
    import inspect

    from vllm.v1.worker.gpu.spec_decode.autoregressive.speculator import AutoRegressiveSpeculator
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    assert {"input_batch", "dummy_run"} <= set(inspect.signature(DraftModelSpeculator.propose).parameters)
    assert "return self.draft_tokens[:num_reqs]" in inspect.getsource(AutoRegressiveSpeculator.propose)


def test_a_runner_without_a_proposer_says_so() -> None:
    assert not pause_draft(SimpleNamespace(), True)
    assert not pause_draft(SimpleNamespace(speculator=None), True)


@pytest.mark.parametrize("runner", ["drafter", "speculator"])
def test_a_proposer_that_has_changed_is_named(runner: str) -> None:
    class Changed:
        model = None

        def propose(self, something: int) -> None: ...

    with pytest.raises(PatchError, match="has no argument"):
        pause_draft(SimpleNamespace(**{runner: Changed()}), True)


def test_a_look_up_has_no_forward_pass_to_leave_out() -> None:
    look_up = SimpleNamespace(propose=len)
    assert pause_draft(SimpleNamespace(drafter=look_up), True)
    assert look_up.propose is len


@pytest.mark.parametrize(("largest", "k"), [(1, 3), (2, 3), (3, 3), (4, 3), (64, 3), (256, 8)])
def test_the_first_table_names_every_k_so_that_each_has_its_graphs(largest: int, k: int) -> None:
    from vllm.v1.spec_decode import dynamic

    from spec_plugin.methods.tables import every_k

    table = dynamic.utils.build_dynamic_sd_schedule_lookup(
        every_k(largest, k), vllm_max_batch_size=largest, vllm_num_speculative_tokens=k
    )
    assert len(table) == largest + 1 and table[1] == k
    assert set(table[1:]) == set(range(k + 1)) or largest <= k
