"""An interpreter that has imported the heavy libraries once, for the tests that ask a process of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from spec_plugin.conformance.forks import ForkServer

#: of third parties only, and not verl: what its import finds in the environment is itself asked
MODULES = (
    "torch.distributed",
    "transformers.models.qwen3.modeling_qwen3",
    "ray",
    "vllm.engine.arg_utils",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.engine.core_client",
    "vllm.v1.worker.gpu_worker",
    "tensordict",
    "hydra",
)
_SERVER = pytest.StashKey[ForkServer]()


def _start(config: pytest.Config) -> str:
    """The server's ``python``; else vLLM logs to its stdout."""
    if _SERVER not in config.stash:
        config.stash[_SERVER] = ForkServer(MODULES, {**os.environ, "VLLM_CONFIGURE_LOGGING": "0"})
    return config.stash[_SERVER].python


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist's: one server for all workers."""
    node.workerinput["warm_python"] = _start(node.config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """The server ends with the session."""
    if _SERVER in config.stash:
        config.stash[_SERVER].close()


def _wants_one(item: pytest.Item) -> bool:
    return "warm_run" in getattr(item, "fixturenames", ())


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Start it, and let the tests that need it come last: by then it has imported, on another core."""
    config = session.config
    if any(map(_wants_one, items)) and not config.option.collectonly and not hasattr(config, "workerinput"):
        _start(config)
    items.sort(key=_wants_one)


@pytest.fixture(scope="session")
def warm_run(pytestconfig: pytest.Config) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python with these arguments in a process that begins with ``MODULES`` imported, and with nothing of ours."""
    workerinput = getattr(pytestconfig, "workerinput", None)
    python = workerinput["warm_python"] if workerinput else _start(pytestconfig)

    def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run([python, *arguments], capture_output=True, text=True, **options)

    return run
