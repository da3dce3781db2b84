"""One real engine across two nodes that share no memory: the first rank reads the draft, the second one gets it from there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small
from refreshing import acceptance_length
from safetensors.torch import save_file
from spec_plugin_conformance.launch import free_port

from draft_training import digest

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent
#: runs a program that sees another /dev/shm than we do
APART = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")


@pytest.fixture
def two_nodes(target: Path, draft: Path, tmp_path: Path) -> Iterator[Any]:
    """An engine of two tensor parallel ranks, one of them on a node of its own."""
    try:
        subprocess.run([*APART, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mounts of one's own here: {error}")
    shared = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "nnodes": 2}
    shared |= {"master_addr": "127.0.0.1", "master_port": free_port()}
    options = json.dumps({"model": str(target), **small.engine_options(draft), **shared, "node_rank": 1})
    with (tmp_path / "second.log").open("w") as log:
        second = subprocess.Popen(
            [*APART, sys.executable, str(HERE / "second_node.py"), options],
            env={"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        llm = small.start_engine(target, draft, node_rank=0, **shared)
        yield llm
        llm.llm_engine.engine_core.shutdown()
    finally:
        os.killpg(second.pid, signal.SIGKILL)
        second.wait()


def test_a_rank_on_another_node_gets_a_draft_that_it_cannot_read(two_nodes, config, greedy_reference):
    assert small.greedy(two_nodes) == greedy_reference
    tensors = small.good_tensors(config)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        file = Path(folder) / "draft.safetensors"
        save_file(tensors, file)
        reports = two_nodes.collective_rpc("spec_install_file", args=(str(file), 1, digest(tensors), list(tensors)))
    assert [(r["installed"], r["reason"]) for r in reports] == [(True, "")] * 2
    assert small.greedy(two_nodes) == greedy_reference and acceptance_length(two_nodes) > 3.5
