"""Runs the scripts of these tests that start ranks of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SETTING = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def results(script: str, *arguments: Path, seconds: float) -> list[Any]:
    """What a script of this folder prints in lines that begin with RESULT, as JSON.

    Ranks that wait for each other outlive whoever started them, so what they write goes to a file (a pipe of theirs would never
    end), and the whole group is ended; at the limit each says where it was.

    Raises:
        AssertionError: with the end of its output, if it fails or takes longer.
    """
    log = arguments[-1] / f"{script}.log"
    with log.open("w") as out:
        command = [sys.executable, str(HERE / script), *map(str, arguments)]
        process = subprocess.Popen(
            command, env=os.environ | SETTING, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = f"none in {seconds:.0f} s"
            os.killpg(process.pid, signal.SIGABRT)
            time.sleep(2)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in log.read_text(errors="replace").splitlines() if not line.startswith("Extension modules")]
    assert code == 0, "\n".join([f"{script}: exit code {code}", *lines[-200:]])
    return [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT ")]
