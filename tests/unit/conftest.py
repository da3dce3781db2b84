"""Interpreters that have imported the heavy libraries once: for pytest-xdist's workers, and for tests that ask a process."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from spec_plugin_cpu.forks import ForkServer

pytest.register_assert_rewrite("builders")  # what they assert is told as in a test

#: of third parties only, and not verl: what its import finds in the environment is itself asked
WORKERS = ("torch.distributed", "transformers.models.qwen3.modeling_qwen3", "pandas")
PROCESSES = (
    "ray",
    "vllm.engine.arg_utils",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.engine.core_client",
    "vllm.v1.worker.gpu_worker",
    "tensordict",
    "hydra",
)
UNIT = Path(__file__).parent
#: files whose tests simulate runs, start processes or compose configurations: a quarter of the tests, more than half of the time
SLOW = frozenset((UNIT / "slow.txt").read_text().split())
_SERVERS = pytest.StashKey[list[ForkServer]]()


def _servers(config: pytest.Config) -> list[ForkServer]:
    """One that has what workers import, and one that began as its fork and has the rest."""
    if _SERVERS not in config.stash:
        first = ForkServer(WORKERS)
        quiet = {**os.environ, "VLLM_CONFIGURE_LOGGING": "0"}  # else vLLM logs to stdout
        config.stash[_SERVERS] = [first, ForkServer(PROCESSES, quiet, first.python)]
    return config.stash[_SERVERS]


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist starts its workers
def pytest_sessionstart(session: pytest.Session) -> None:
    """Workers begin as forks of the first server."""
    config = session.config
    if getattr(config.option, "tx", None) and not hasattr(config, "workerinput"):
        python = _servers(config)[0].python
        config.option.tx = [f"{spec}//python={python}" if spec == "popen" else spec for spec in config.option.tx]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist's: what each worker is told."""
    node.workerinput |= {"warm_python": _servers(node.config)[1].python, "python": sys.executable}


def pytest_configure(config: pytest.Config) -> None:
    """A worker's ``sys.executable`` is a cold interpreter, as without workers."""
    if hasattr(config, "workerinput"):
        sys.executable = config.workerinput["python"]


def pytest_unconfigure(config: pytest.Config) -> None:
    """The servers end with the session."""
    for server in reversed(config.stash.get(_SERVERS, [])):
        server.close()


def _wants_one(item: pytest.Item) -> bool:
    return "warm_run" in getattr(item, "fixturenames", ())


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Start them, and let the tests that need one come last: by then it has imported, on another core."""
    config = session.config
    if any(map(_wants_one, items)) and not config.option.collectonly and not hasattr(config, "workerinput"):
        _servers(config)
    items.sort(key=_wants_one)


@pytest.fixture(scope="session")
def warm_run(pytestconfig: pytest.Config) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python with these arguments in a process that begins with all of that imported, and with nothing of ours."""
    workerinput = getattr(pytestconfig, "workerinput", None)
    python = workerinput["warm_python"] if workerinput else _servers(pytestconfig)[1].python

    def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run([python, *arguments], capture_output=True, text=True, **options)

    return run


@pytest.fixture(scope="session")
def found_by(warm_run: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[[str], dict[str, Any]]:
    """Runs a script in such a process, without verl's switches; what it prints as JSON behind the word FOUND."""

    def run(script: str) -> dict[str, Any]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
        done = warm_run("-c", textwrap.dedent(script), env=environment, timeout=300)
        lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
        assert lines, done.stdout + done.stderr[-3000:]
        found: dict[str, Any] = json.loads(lines[0].removeprefix("FOUND "))
        return found

    return run


@pytest.fixture(autouse=True)
def _log_lines_reach_caplog() -> Iterator[None]:
    """Whatever was done before: an adapter's import gives our logger a handler; vLLM's brings model_hosting_container_standards,
    whose import sets the root logger and all handlers that it has by then, pytest's among them, to ERROR."""
    root, ours = logging.getLogger(), logging.getLogger("spec_plugin")
    handlers, propagate, level = ours.handlers, ours.propagate, ours.level
    for handler in root.handlers:
        handler.setLevel(logging.NOTSET)
    root.setLevel(logging.WARNING)
    ours.handlers, ours.propagate = [], True
    ours.setLevel(logging.NOTSET)  # also forgets what children have cached
    yield
    ours.handlers, ours.propagate = handlers, propagate
    ours.setLevel(level)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what ``make unit`` leaves to ``make test``."""
    if item.path.relative_to(UNIT).with_suffix("").as_posix() in SLOW:
        item.add_marker(pytest.mark.slow)
