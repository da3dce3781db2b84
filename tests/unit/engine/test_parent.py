"""EngineCore's process ends with the one that started it; an engine inside another process is left alone."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

PARENT = """
import multiprocessing, signal, sys, time

def core(out, deaf):
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    from spec_plugin.engine.vllm import parent
    parent.LOOK_S, parent.END_S = 0.05, 0.5
    parent.end_with_parent()
    open(out, "w").close()
    time.sleep(120)

if __name__ == "__main__":
    _, name, out, deaf, how = sys.argv
    child = multiprocessing.get_context(how).Process(target=core, args=(out, deaf == "deaf"), name=name)
    child.start()
    print(child.pid, flush=True)
    time.sleep(120)
"""


def orphan(tmp_path: Path, name: str, deaf: str = "", how: str = "fork") -> psutil.Process:
    """A process whose parent was killed."""
    script, ready = tmp_path / "parent.py", tmp_path / "ready"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, script, name, ready, deaf, how], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    limit = time.monotonic() + 60
    while not ready.exists() and time.monotonic() < limit:
        time.sleep(0.02)
    time.sleep(0.3)
    assert child.is_running(), "its parent lives"
    parent.kill()
    parent.wait()
    return child


def ends(process: psutil.Process, seconds: float) -> bool:
    """Whether it ends; whoever adopted it may take a while to notice."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(("deaf", "how"), [("", "fork"), ("deaf", "fork"), ("", "spawn"), ("", "forkserver")])
def test_engine_core_ends_when_its_parent_is_killed(tmp_path: Path, deaf: str, how: str) -> None:
    assert ends(orphan(tmp_path, "EngineCore_DP0", deaf, how), 30)


def test_a_process_that_is_no_engine_core_outlives_its_parent(tmp_path: Path) -> None:
    child = orphan(tmp_path, "Trainer")
    try:
        assert not ends(child, 2)
    finally:
        with suppress(psutil.NoSuchProcess):
            child.kill()
