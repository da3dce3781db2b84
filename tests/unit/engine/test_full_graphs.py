"""``spec.full_graphs``: vLLM hears of no table of k on V1, and its own rule then leaves the graphs as they are."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from spec_plugin import model_runner
from spec_plugin.engine import full_graphs
from spec_plugin.engine.full_graphs import keep_full_graphs
from spec_plugin.model_runner import SWITCH, Runner

TABLE = "num_speculative_tokens_per_batch_size"
SETTINGS = {"method": "eagle3", "num_speculative_tokens": 3, TABLE: [(1, 8, 3)]}


def runs_on(v2: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_graphs, "runner_of", lambda *_: Runner(v2, "so it is"))
    monkeypatch.delenv(SWITCH, raising=False)


def test_on_v1_the_table_is_kept_from_vllm_and_v1_is_made_sure_of(monkeypatch: pytest.MonkeyPatch) -> None:
    runs_on(False, monkeypatch)
    told, ours = keep_full_graphs(SETTINGS, "cuda")
    assert told == {"method": "eagle3", "num_speculative_tokens": 3} and ours == {"own_table": True}
    assert os.environ.pop(SWITCH) == "0" and TABLE in SETTINGS


def test_on_v2_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    runs_on(True, monkeypatch)
    assert keep_full_graphs(SETTINGS, "cuda") == (SETTINGS, {}) and SWITCH not in os.environ


def test_a_plugin_whose_k_cannot_change_goes_on_so(monkeypatch: pytest.MonkeyPatch) -> None:
    runs_on(False, monkeypatch)
    fixed = {"method": "eagle3", "num_speculative_tokens": 3}
    assert keep_full_graphs(fixed, "cuda") == (fixed, {}) and SWITCH not in os.environ


def test_vllms_own_rule_makes_graphs_piecewise_for_a_table_and_leaves_them_without() -> None:
    """If this fails because the rule is gone, ``spec.full_graphs`` has no purpose any more."""
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig
    from vllm.config.compilation import CUDAGraphMode

    def mode(table: Any) -> Any:
        speculative = SimpleNamespace(
            num_speculative_tokens_per_batch_size=table, uses_dynamic_speculative_decoding=lambda: table is not None
        )
        compilation = SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
        config = SimpleNamespace(
            speculative_config=speculative, compilation_config=compilation, use_v2_model_runner=False
        )
        VllmConfig._maybe_override_dynamic_sd_cudagraph_mode(config)
        return compilation.cudagraph_mode

    assert mode([(1, 8, 3)]) == CUDAGraphMode.PIECEWISE and mode(None) == CUDAGraphMode.FULL_AND_PIECEWISE


def test_a_vllm_whose_v2_cannot_change_k_would_choose_it_without_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the switch is needed: as in 0.24."""
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(model_runner, "v2_takes_every_k", lambda: False)
    monkeypatch.setattr(model_runner, "_has_triton", lambda _: True)
    told, ours = keep_full_graphs(SETTINGS, "cuda")
    assert TABLE not in told and ours and os.environ.pop(SWITCH) == "0"
