"""EngineCore's process ends with the process that started it.

vLLM's workers watch EngineCore, but EngineCore watches nobody: where the server, or the trainer that holds it, is killed, it
waits for requests that never come, with its weights and KV cache on the card (seen with vLLM 0.29, with and without this
plugin). With it, the next run finds the memory free.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

#: seconds between two looks; seconds that vLLM has to end by itself, its workers with it
LOOK_S, END_S = 1.0, 10.0


def end_with_parent() -> None:
    """Watch the parent process from a thread.

    Does nothing where the engine runs in the process of whoever asks it, which may outlive its parent.
    """
    parent, here = multiprocessing.parent_process(), multiprocessing.current_process()
    if parent is None or not here.name.startswith("EngineCore"):
        return
    first = os.getppid()
    # multiprocessing asks whether a pipe is closed, which any other child of the parent may hold open
    ours = first == parent.pid
    alive: Callable[[], bool] = (lambda: os.getppid() == first) if ours else parent.is_alive  # a fork server is between
    threading.Thread(target=_watch, args=(alive,), name="spec-parent", daemon=True).start()


def _watch(alive: Callable[[], bool]) -> None:
    while alive():
        time.sleep(LOOK_S)
    logger.warning(
        "spec-plugin: the process that started this engine has died, so the engine stops and frees its memory; "
        "the cause is in that process's log"
    )
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_S)
    os.kill(os.getpid(), signal.SIGKILL)
