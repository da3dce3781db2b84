"""Full CUDA graphs on vLLM's V2 model runner for every k of an engine as the flag starts it; which graphs, not their capture.

An H100 with vLLM 0.26 showed the fault (examples/bench/NOTEBOOK.md). What is not a GPU's here is real: config, managers, table.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small  # noqa: F401
import torch
from spec_plugin_cpu.repairs import compat as cpu_compat

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.events import TargetInfo
from spec_plugin.engine.front import EngineFront
from spec_plugin.engine.vllm.extension import SpecWorkerExtension
from spec_plugin.engine.vllm.repairs import patches
from spec_plugin.engine.vllm.repairs.graphs import GRAPH_PATCHES, graphs_are_missed
from spec_plugin.lifecycle.session import SpecSession

pytestmark = pytest.mark.engine

K, REQUESTS = 7, 16
(PATCH,) = GRAPH_PATCHES
utils = pytest.importorskip("vllm.v1.worker.gpu.cudagraph_utils")


@pytest.fixture
def vllm_config(target, draft, monkeypatch) -> Any:
    """Of an engine with the flag, with the runner and the graphs that a GPU gives it."""
    from vllm import EngineArgs
    from vllm.config import CUDAGraphMode

    hf = json.loads((target / "config.json").read_text())
    info = TargetInfo(path=str(target), hf_config=hf, dtype="float32", device_type="cpu", max_num_seqs=REQUESTS)
    front = EngineFront(SpecSession(SpecConfig.parse({"k": K, "draft": str(draft)}), info), None)
    given = {"max_num_seqs": REQUESTS, "max_model_len": 128, "dtype": "float32"}
    asked = given | front.engine_arguments(given, "spec_plugin.engine.vllm.extension.SpecWorkerExtension")
    config = EngineArgs(model=str(target), **asked).create_engine_config()
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    config.compilation_config.cudagraph_capture_sizes = [1, 2, 4, 8, 16, 32, 64, 128]
    config.compilation_config.max_cudagraph_capture_size = 128
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    monkeypatch.setattr(utils, "get_pp_group", lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True))
    monkeypatch.setattr(utils.current_platform, "get_global_graph_pool", lambda: None, raising=False)
    cpu_compat.register_kernels()
    patches.revert(PATCH)
    yield config
    patches.revert(PATCH)


def manager_of(config: Any, length: int, mode: Any) -> Any:
    """vLLM's manager of the graphs of passes that have up to ``length`` tokens of each request, as if they were captured."""
    manager = utils.CudaGraphManager(config, torch.device("cpu"), mode, length)
    manager._graphs_captured = True
    return manager


def lengths_of(manager: Any) -> set[int | None]:
    """Tokens of each request in its full graphs."""
    from vllm.config import CUDAGraphMode

    graphs = manager._capture_descs[CUDAGraphMode.FULL]
    assert all(graph.num_tokens == graph.num_reqs * graph.uniform_token_count for graph in graphs)
    assert [g.num_tokens for g in graphs] == sorted((g.num_tokens for g in graphs), reverse=True)  # the largest first
    return {graph.uniform_token_count for graph in graphs}


def served(manager: Any, requests: int, length: int) -> Any:
    """The graph by which so many requests of so many tokens each run."""
    return manager.dispatch(
        num_reqs=requests, num_tokens=requests * length, uniform_token_count=length, num_active_loras=0
    )


def test_a_draft_gets_graphs_of_one_token_and_each_batch_of_each_k_one_of_its_own(vllm_config):
    from vllm.config import CUDAGraphMode

    if not knows_tables():
        pytest.skip("this vLLM gives such an engine its V1 model runner")
    both, decoding = CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY
    if graphs_are_missed(utils.CudaGraphManager._init_candidates):  # else vLLM has mended both
        try:
            manager_of(vllm_config, 1, decoding)
        except ZeroDivisionError:
            pass
        else:
            assert served(manager_of(vllm_config, K + 1, both), 3, 1).cg_mode != CUDAGraphMode.FULL
    SpecWorkerExtension.__new__(SpecWorkerExtension, vllm_config=vllm_config)
    draft = manager_of(vllm_config, 1, decoding)
    assert lengths_of(draft) == {1} and served(draft, 5, 1).num_tokens == 8
    for manager in (manager_of(vllm_config, K + 1, both), manager_of(vllm_config, K + 1, decoding)):
        assert lengths_of(manager) == set(range(1, K + 2))
        for k in range(K + 1):
            for requests in range(1, REQUESTS + 1):
                graph = served(manager, requests, k + 1)
                assert (graph.cg_mode, graph.uniform_token_count) == (CUDAGraphMode.FULL, k + 1)
                assert (
                    requests <= graph.num_reqs <= max(2 * requests, 8)
                    and graph in manager._capture_descs[graph.cg_mode]
                )
    # its draft is asked with the padded number, and gets the graph that the target has
    padded = manager.dispatch(num_reqs=8, num_tokens=8, uniform_token_count=1, num_active_loras=0)
    assert padded == served(manager, 5, 1)
    mixed = {"num_reqs": 3, "num_tokens": 11, "uniform_token_count": None, "num_active_loras": 0}
    assert manager_of(vllm_config, K + 1, both).dispatch(**mixed).cg_mode == CUDAGraphMode.PIECEWISE
    assert manager.dispatch(**mixed).cg_mode == CUDAGraphMode.NONE
    assert vllm_config.speculative_config.num_speculative_tokens_per_batch_size is not None  # the runner still asks it


def test_graphs_of_each_k_for_as_many_requests_as_plain_decoding_has(vllm_config):
    from vllm.config import CUDAGraphMode

    if not knows_tables():
        pytest.skip("this vLLM gives such an engine its V1 model runner")
    SpecWorkerExtension.__new__(SpecWorkerExtension, vllm_config=vllm_config)
    manager = manager_of(vllm_config, K + 1, CUDAGraphMode.FULL_DECODE_ONLY)
    by_length: dict[int, set[int]] = {}
    for graph in manager._capture_descs[CUDAGraphMode.FULL]:
        by_length.setdefault(graph.uniform_token_count, set()).add(graph.num_reqs)
    assert by_length[1] == {1, 2, 4, 8, 16}
    for length, requests in by_length.items():
        assert requests == {n for n in by_length[1] if n * length <= 128} | {min(REQUESTS, 128 // length)}, length


def test_a_full_engine_has_a_graph_of_the_drafts_own_passes_too(vllm_config, monkeypatch):
    """Twelve requests at most, vLLM's sizes 8 and 16: a draft's passes of nine to twelve have no piecewise graph either."""
    from vllm.config import CUDAGraphMode

    if not knows_tables():
        pytest.skip("this vLLM gives such an engine its V1 model runner")
    monkeypatch.setattr(vllm_config.scheduler_config, "max_num_seqs", 12)
    SpecWorkerExtension.__new__(SpecWorkerExtension, vllm_config=vllm_config)
    for mode in (CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.NONE):
        graph = served(manager_of(vllm_config, 1, mode), 11, 1)
        assert (graph.cg_mode, graph.num_reqs) == (mode.decode_mode(), 12 if mode else 11)


def test_an_engine_whose_k_stands_still_has_vllms_own(vllm_config):
    from vllm.config import CUDAGraphMode

    vllm_config.speculative_config.num_speculative_tokens_per_batch_size = None
    own = manager_of(vllm_config, K + 1, CUDAGraphMode.FULL_AND_PIECEWISE)
    SpecWorkerExtension.__new__(SpecWorkerExtension, vllm_config=vllm_config)
    ours = manager_of(vllm_config, K + 1, CUDAGraphMode.FULL_AND_PIECEWISE)
    assert (own._candidates, own._capture_descs) == (ours._candidates, ours._capture_descs)


def test_engines_without_such_graphs_are_left_alone(vllm_config):
    from vllm.config import CUDAGraphMode

    vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
    before = utils.CudaGraphManager._init_candidates
    SpecWorkerExtension.__new__(SpecWorkerExtension, vllm_config=vllm_config)
    assert utils.CudaGraphManager._init_candidates is before


def test_it_can_be_left_out(vllm_config):
    vllm_config.additional_config["spec_plugin"] = {"skip_patches": [PATCH.name]}
    SpecWorkerExtension.__new__(SpecWorkerExtension, vllm_config=vllm_config)
    assert {s.name: s.state for s in patches.statuses.values()}[PATCH.name] == "skipped"


def knows_tables() -> bool:
    """Does this vLLM's V2 model runner make graphs by a table of k."""
    return "uses_dynamic_speculative_decoding" in Path(utils.__file__).read_text()
