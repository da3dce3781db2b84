"""The fork server: imports modules once, and then forks a process for each command line that a stand-in sends.

Run as a script by :class:`spec_plugin_cpu.forks.ForkServer`. Standard library only, beside what it is told to import.
A forked process has the stand-in's arguments, environment, folder and files, and runs as if an interpreter had just started,
but for the modules that are imported already.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import types
from typing import Any

_PR_SET_PDEATHSIG = 1
_HANDLED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
_LOOK_S = 2.0  # how often a server looks whether whoever started it is still there
_HIGH = 512  # our own files lie above, so that a process can have its own at the numbers that it was promised


def die_with_parent(number: int) -> None:
    """Have the kernel send us a signal when our parent is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


class Server:
    """Accepts stand-ins, forks, and tells each how its process ended."""

    def __init__(self, listener: socket.socket, parent: int) -> None:
        self.listener = _high(listener)
        self.parent = parent  # 0: another server's fork, which ends with that one
        self.selector = selectors.DefaultSelector()
        self.running: dict[int, socket.socket] = {}  # by process number
        self.leaders: set[int] = set()  # those of them that end with whatever they started
        self.wake = tuple(_high(end) for end in socket.socketpair())
        for end in self.wake:
            end.setblocking(False)
        signal.set_wakeup_fd(self.wake[1].fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self.stop())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is our parent's to act on
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(self.wake[0], selectors.EVENT_READ)

    def serve(self) -> dict[str, Any]:
        """Serve until stopped; returns only in a forked process, with what it is to run."""
        while True:
            ready = self.selector.select(_LOOK_S)
            if self.parent and os.getppid() != self.parent:  # the kernel's signal is lost while we begin
                self.stop()
            for key, _ in ready:
                if key.fileobj is self.listener:
                    job = self.accept()
                    if job is not None:
                        return job
                elif key.fileobj is self.wake[0]:
                    with contextlib.suppress(BlockingIOError):
                        self.wake[0].recv(4096)
                    self.reap()
                else:  # a stand-in was killed: so is its process
                    self.forget(key.data)

    def accept(self) -> dict[str, Any] | None:
        """Fork for one stand-in; what to run in the new process, None in ours."""
        client = _high(self.listener.accept()[0])
        try:
            head, files, *_ = socket.recv_fds(client, 8, 250)
            job = json.loads(_exactly(client, int.from_bytes(head, "big"))) if head else None
        except (OSError, ValueError):
            job, files = None, []
        if job is None:  # it went away, or became the real interpreter
            client.close()
            return None
        # until the new process has let go of our handlers, a signal to it would have it stop the server's processes
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        server, pid = os.getpid(), os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for file in files:
                os.close(file)
            self.running[pid] = client
            if job["leads"]:
                self.leaders.add(pid)
            self.selector.register(client, selectors.EVENT_READ, pid)
            with contextlib.suppress(OSError):
                client.sendall(pid.to_bytes(8, "big"))
            return None
        die_with_parent(signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
        self.leave(client)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        take_over(job, files)
        found: dict[str, Any] = job
        return found

    def leave(self, client: socket.socket) -> None:
        """Close everything of the server, in a forked process."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.selector.close()
        for end in (client, self.listener, *self.wake, *self.running.values()):
            end.close()

    def reap(self) -> None:
        """Send the exit status of each process that ended to its stand-in."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                client = self.running.pop(pid, None)
                self.leaders.discard(pid)
                if client is not None:
                    self.selector.unregister(client)
                    with contextlib.suppress(OSError):
                        client.sendall(status.to_bytes(8, "big"))
                    client.close()

    def forget(self, pid: int) -> None:
        """Kill a process whose stand-in was killed."""
        client = self.running.pop(pid, None)
        if client is not None:
            self.selector.unregister(client)
            client.close()
            self.kill(pid)

    def kill(self, pid: int) -> None:
        """Kill a process; one that leads, with its group."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            if pid in self.leaders:
                os.killpg(pid, signal.SIGKILL)

    def stop(self) -> None:
        """Kill every forked process and exit; does not return."""
        for pid in self.running:
            self.kill(pid)
        os._exit(0)


def _high(end: socket.socket) -> socket.socket:
    return socket.socket(end.family, fileno=_copy_high(end.detach()))


def _exactly(client: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = client.recv(min(size, 1 << 16))
        if not part:
            raise ValueError("the stand-in went away")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def take_over(job: dict[str, Any], files: list[int]) -> None:
    """In a forked process: take the stand-in's files, working folder, umask and environment, in a new session."""
    os.setsid()
    copies = [(_copy_high(file), number) for file, number in zip(files, job["files"], strict=True)]
    for copy, number in copies:
        os.dup2(copy, number)  # inheritable, as they were
        os.close(copy)
    os.umask(job["umask"])
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])


def _copy_high(file: int) -> int:
    copy = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    os.close(file)
    return copy


def run(job: dict[str, Any], path: list[str]) -> None:
    """Run a program as ``__main__``.

    Args:
        job: what the stand-in sent.
        path: of modules, without what depends on the program or on PYTHONPATH.
    """
    what, value, arguments = job["program"]
    first = {"-c": "", "-m": os.getcwd()}.get(what, os.path.dirname(os.path.realpath(value)))
    sys.path[:] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    sys.argv = ["-c" if what == "-c" else value, *arguments]
    importlib.invalidate_caches()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # random and uuid see to themselves
    if what == "-m":
        runpy.run_module(value, run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    source: str | bytes = value
    if what == "script":
        main.__file__ = value
        with open(value, "rb") as file:
            source = file.read()
    exec(compile(source, "<string>" if what == "-c" else value, "exec"), main.__dict__)


def leave_rays_random_numbers_alone() -> None:
    """Have classes that are declared while we import take their ids from the system.

    Ray's library draws ids from a generator that it seeds at its first use, and a fork inherits. Once used before the fork, two
    processes give objects the same ids, in the same order: what one of them stored was handed to the other's tasks.
    """
    actors: Any = importlib.import_module("ray.actor")
    ids = actors.ActorClassID
    actors.ActorClassID = types.SimpleNamespace(from_random=lambda: ids(os.urandom(ids.size())))


def forks_share_ids() -> bool:
    """Whether two forks of this process draw the same id from Ray's library."""
    ray: Any = importlib.import_module("ray._raylet")
    drawn = []
    for _ in range(2):
        ours, theirs = os.pipe()
        if not (pid := os.fork()):
            os.write(theirs, ray.PlacementGroupID.of(ray.JobID.from_int(1)).binary())
            os._exit(0)
        os.close(theirs)
        drawn.append(os.read(ours, 64))
        os.close(ours)
        os.waitpid(pid, 0)
    return drawn[0] == drawn[1]


def serve() -> tuple[dict[str, Any], list[str]]:
    """Import, then serve: arguments are the listening socket's number, the stand-in, our parent, and the modules."""
    number, stand_in, parent, *modules = sys.argv[1:]
    die_with_parent(signal.SIGTERM)
    sys.executable = stand_in  # whoever starts an interpreter from a forked process gets a fork again
    ours = set(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))) | {sys.path[0]}
    path = [entry for entry in sys.path if entry not in ours]
    # Ray's library reads these when it is imported, for good: a local cluster has one job, and this is its number; its
    # workers end when the process with that number ends, which need not be the raylet, since that one tells them
    os.environ.update(RAY_JOB_ID="01000000", RAY_RAYLET_PID=str(os.getpid()))
    if "ray" in modules:
        leave_rays_random_numbers_alone()
    for module in modules:
        importlib.import_module(module)
    if "ray" in modules and forks_share_ids():
        raise SystemExit(
            "the fork server ends, and each process imports for itself: its imports have used Ray's random numbers, so that its "
            "forks would give different objects the same ids"
        )
    gc.collect()
    gc.freeze()  # a collection would touch, and so copy, every page
    return Server(socket.socket(fileno=int(number)), int(parent)).serve(), path


def leave(code: int) -> None:
    """End as an interpreter does, but for freeing what was imported, which takes seconds and frees nothing: it is shared."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Serve; in a forked process run the program, and end with its exit code."""
    job, path = serve()
    try:
        run(job, path)
    except SystemExit as stop:
        if stop.code is not None and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
        leave(stop.code if isinstance(stop.code, int) else int(stop.code is not None))
    except KeyboardInterrupt:
        leave(128 + signal.SIGINT)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        leave(1)
    leave(0)


if __name__ == "__main__":
    main()
