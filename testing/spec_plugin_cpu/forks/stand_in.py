"""Stands in for the Python interpreter: has the fork server run this command line, and lives and dies with that process.

Called by a script that :class:`spec_plugin_cpu.forks.ForkServer` writes, with the real interpreter and the server's
address before the interpreter's own arguments. Standard library only, and little of it: it starts once per process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence

_LOOK_S = 1.0  # between two looks whether Ray's raylet is there
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
Program = tuple[str, str, list[str]]


def parsed(arguments: Sequence[str]) -> Program | None:
    """What an interpreter is asked to run: "-c", "-m" or "script", its value, and its arguments; None: not known here."""
    rest = list(arguments)
    while rest and rest[0] in ("-u", "-B"):
        rest.pop(0)
    if len(rest) >= 2 and rest[0] in ("-c", "-m"):
        return rest[0], rest[1], rest[2:]
    return ("script", rest[0], rest[1:]) if rest and not rest[0].startswith("-") else None


def inherited() -> list[int]:
    """Numbers of the files that a program started by us would inherit."""
    numbers = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listed folder's own is closed again
            if os.get_inheritable(int(name)):
                numbers.append(int(name))
    return sorted(numbers)


def leads() -> bool:
    """Whether we lead a process group: who made it for us signals the group, and means whatever the process started too."""
    return os.getpgrp() == os.getpid()


def request(server: socket.socket, program: Program, files: Sequence[int]) -> int:
    """Send what to run, and our open files; the number of the process, or 0 if the server went away."""
    umask = os.umask(0o077)
    os.umask(umask)
    job: dict[str, object] = {"program": program, "cwd": os.getcwd(), "env": dict(os.environ), "files": files}
    job |= {"umask": umask, "leads": leads()}
    body = json.dumps(job).encode()
    socket.send_fds(server, [len(body).to_bytes(8, "big")], files)
    server.sendall(body)
    return int.from_bytes(server.recv(8, socket.MSG_WAITALL), "big")


def forward(pid: int, number: int) -> None:
    """Send a signal that we got to the process, or to its group."""
    with contextlib.suppress(ProcessLookupError):
        if leads():
            try:
                os.killpg(pid, number)
            except ProcessLookupError:  # it has only just begun
                os.kill(pid, number)
        else:
            os.kill(pid, number)


def answer(server: socket.socket, parent: int) -> bytes:
    """How the process ended; empty if the server was killed, or Ray's raylet, which would end its workers by itself.

    They ask whether the process with the number in RAY_RAYLET_PID is there, which is the server to them.
    """
    if os.environ.get("RAY_RAYLET_PID") == str(parent):
        while not select.select([server], [], [], _LOOK_S)[0]:
            if os.getppid() != parent:
                return b""
    return server.recv(8, socket.MSG_WAITALL)


def main() -> None:
    """Ask, wait, and end as the process ended; without a server, become the real interpreter."""
    parent = os.getppid()
    python, address, *arguments = sys.argv[1:]
    program, files, pid = parsed(arguments), inherited(), 0
    early: list[int] = []  # signals that came before the process was known: it may be running already

    def signalled(number: int, _frame: object) -> None:
        if pid:
            forward(pid, number)
        elif early:  # whoever signals twice does not want to wait for a server that imports
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        else:
            early.append(number)

    for number in _FORWARDED:
        signal.signal(number, signalled)
    server = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(OSError):
        if program is not None:
            server.connect(address)
            pid = request(server, program, files)
    if not pid:
        server.close()
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        for missed in early:
            os.kill(os.getpid(), missed)
        os.execv(python, [python, *arguments])
    for missed in early:
        forward(pid, missed)
    for file in files:
        os.close(file)  # the process has them: whoever waits for their end must not wait for us
    ended = answer(server, parent)
    if not ended:  # its process ends with us
        os._exit(1)
    code = os.waitstatus_to_exitcode(int.from_bytes(ended, "big"))
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


main()
