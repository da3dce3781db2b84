"""A fork server for small machines: the processes of a trainer are forked from one that has imported what they need.

A run of verl on a CPU is eight Python processes, and each spends 10 to 30 seconds of CPU on importing the same modules
before it is useful. Here they are imported once: ``ForkServer.python`` is the path of an executable that stands in for the
Python interpreter. It has its command line run by a fork of the server, hands over its files and environment, forwards
signals, and ends as that process ends. A forked process knows it as ``sys.executable``, so that Ray's workers and vLLM's
engine, which start interpreters of their own, are forked too.

What differs from a cold start: modules are imported already; ``sys.flags``, priority and limits are the server's; a process
leads a session of its own, and ends without freeing its modules. If an import fails, the server says why and is gone, and
the stand-in becomes the interpreter: everything starts cold.
"""

from __future__ import annotations

import atexit
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from spec_plugin.plan.own_folders import disk, own_folder, sweep_own

_HERE = Path(__file__).resolve().parent
_servers: dict[tuple[str, ...], ForkServer] = {}


def warm_python(modules: Sequence[str], env: Mapping[str, str]) -> str:
    """The executable to start a run's process with: a stand-in where that saves imports.

    Args:
        modules: what the run's processes import; none: the run starts cold. Runs with the same modules share a server.
        env: of the imports, if this run is the first.
    """
    if not modules or is_fork():
        return sys.executable  # in a forked process that is a stand-in already
    key = tuple(modules)
    if key not in _servers:
        _servers[key] = ForkServer(modules, env)
    return _servers[key].python


@dataclass(frozen=True)
class Preloaded:
    """An interpreter that has imported some modules, for :class:`spec_plugin_conformance.launch.Launch`."""

    modules: tuple[str, ...]

    def executable(self, env: Mapping[str, str]) -> str:
        """See :func:`warm_python`; the first call starts the imports and does not wait for them."""
        return warm_python(self.modules, env)

    def processes(self) -> set[int]:
        """Process ids of all fork servers that this process started, of other runs too."""
        return server_processes()


def server_processes() -> set[int]:
    """Process ids of the fork servers that this process started."""
    return {server.pid for server in _servers.values()}


def is_fork() -> bool:
    """Whether this process was forked by a fork server."""
    return sys.orig_argv[1:2] == [str(_HERE / "server.py")]


class ForkServer:
    """One fork server; it ends with :meth:`close`, or with this process."""

    def __init__(self, modules: Sequence[str], env: Mapping[str, str] = os.environ, python: str = "") -> None:
        """Start it; it imports while we go on.

        Args:
            modules: what it imports, in this order. They must start no threads.
            env: of the imports; each process has the environment of its own stand-in.
            python: what runs it: this interpreter, or another server's ``python``, to import on top of what that one has.
        """
        sweep_own()
        self._ours = ExitStack()
        folder = self._ours.enter_context(own_folder(disk()))
        self.python = str(folder / "python")
        address = str(folder / "socket")
        words = [sys.executable, "-IS", str(_HERE / "stand_in.py"), sys.executable, address]
        Path(self.python).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        os.chmod(self.python, 0o700)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(64)
            command = [
                python or sys.executable,
                str(_HERE / "server.py"),
                str(listener.fileno()),
                self.python,
                str(0 if python else os.getpid()),
                *modules,
            ]
            self._process = subprocess.Popen(
                command,
                env={**env, "PYTHONUNBUFFERED": "1"},
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        atexit.register(self.close)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def close(self) -> None:
        """End the server and every process that it forked; safe to call again."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait()
        self._ours.close()
        atexit.unregister(self.close)
