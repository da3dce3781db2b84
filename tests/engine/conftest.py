"""One real vLLM engine for all tests here, and an interpreter that has imported vLLM for the processes that they start."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runner  # before vLLM
import small
from spec_plugin_cpu.forks import ForkServer

from draft_training.config import DraftConfig
from draft_training.eagle3 import save_draft

# vLLM reads it once: without it tensor parallel ranks want a NUMA node each
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

#: what engines and the kit's runs import
MODULES = (
    runner.FIRST,
    "torch",
    "transformers.models.qwen3.modeling_qwen3",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
)


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the engine ``llm`` come first, those of ``live_engine`` last, engines of a test's own between them.

    An engine that starts takes away the counters of those before it in its process, and tests of both shared
    engines read counters. Those of the other model runner are skipped: which one serves, ``runner.assert_serves`` asks
    every engine.
    """

    def place(item: pytest.Item) -> int:
        if "llm" in getattr(item, "fixturenames", ()):
            return 0
        return 2 if hasattr(getattr(item, "module", None), "live_engine") else 1

    items.sort(key=place)
    other, why = (
        ("v1", "not on V2") if runner.V2 else ("v2", f"needs {runner.SWITCH}: python3 tools/check.py engine-v2")
    )
    for item in items:
        if mark := item.get_closest_marker(other):
            item.add_marker(pytest.mark.skip(": ".join((why, *mark.args))))


@pytest.fixture(scope="session", autouse=True)
def warm_python() -> Iterator[str]:
    """Path of an interpreter that has imported ``MODULES``; vLLM's engine cores are started with it too."""
    server = ForkServer(MODULES)
    multiprocessing.set_executable(server.python)
    yield server.python
    multiprocessing.set_executable(sys.executable)
    server.close()


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def config(target: Path) -> DraftConfig:
    return small.draft_config(target)


@pytest.fixture(scope="session")
def draft(target: Path, config: DraftConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts") / "draft"
    save_draft(folder, config, small.draft_tensors(config, seed=1))
    return folder


@pytest.fixture(scope="session")
def llm(target: Path, draft: Path) -> Any:
    return small.start_engine(target, draft)


@pytest.fixture(scope="session")
def greedy_reference(target: Path) -> list[list[int]]:
    return small.reference(target)
