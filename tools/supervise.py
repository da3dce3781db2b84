"""Run one part of the checks so that nothing of it stays; ``check.py`` starts one such process per part.

Daemons leave their session and their parent, but an orphan comes back to the nearest subreaper among its ancestors: this
process. When the part's commands have ended, when SIGTERM comes, or when the process that started it dies, all that is left
is ended. Linux and the standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

TMP = Path("/tmp").resolve()
TMP_VARIABLES = ("TMPDIR", "TMP", "TEMP", "RAY_TMPDIR")
WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
SECONDS_TO_END = 5.0  # between SIGTERM and SIGKILL
SAMPLE_SECONDS = 5.0
OVERTIME = 124  # the exit code of a command that is ended at the limit, as timeout(1) gives it

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18


@dataclass(frozen=True)
class Job:
    """What a supervisor is to do; it comes as JSON on its command line."""

    commands: list[list[str]]  # one after the other, up to the first that fails
    fine: list[int]  # exit codes of a command that passed
    root: str  # the checkout, where they run
    folder: str  # for ``tmp`` and ``result.json``; the log is standard output
    namespace: bool  # whether a folder can be put in the place of /tmp
    parent: int  # process id of who started the supervisor
    limit: float = float("inf")  # seconds for all commands


@dataclass(frozen=True)
class Outcome:
    """What a part did; it is kept as ``result.json``."""

    rc: int  # of the first command that failed, or 0
    stopped: bool = False  # before its end
    wall: float = 0.0  # seconds
    cpu: float = 0.0  # seconds, of all its processes
    peak_gb: float = 0.0  # most memory of all its processes at a time
    left: int = 0  # processes that were still there after its commands


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library.

    Raises:
        OSError: if it returns -1.
    """
    if getattr(LIBC, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def adopt_orphans() -> None:
    """Let the orphans among the descendants become children of this process."""
    call("prctl", PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def hear_of_the_parents_death() -> None:
    """Get SIGTERM when the thread that started this process is gone."""
    call("prctl", PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))


# ---- processes


def descendants(ancestor: int) -> list[int]:
    """Process ids of all children, their children, and so on."""
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it may have ended meanwhile
            stat = Path("/proc", entry, "stat").read_bytes()
            parent = int(stat.rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry))
    found = [ancestor]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def memory(pid: int) -> int:
    """Bytes of a process, its share of what it shares; 0 if it has ended."""
    for file, key in (("smaps_rollup", b"Pss:"), ("status", b"VmRSS:")):
        with suppress(OSError):
            for line in Path("/proc", str(pid), file).read_bytes().splitlines():
                if line.startswith(key):
                    return int(line.split()[1]) * 1024
    return 0


def has_children() -> bool:
    """Whether there is any child, also one that has ended and was not collected."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def collect() -> dict[int, int]:
    """Exit codes of the children that have ended, each once; their CPU time counts from now on."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def sweep(seconds: float = SECONDS_TO_END) -> int:
    """End all descendants, with SIGKILL those that SIGTERM did not end in that time; return how many there were.

    Every chain of descendants begins at a child of this process, so without children there are none.
    """
    deadline = time.monotonic() + seconds
    told: set[int] = set()
    collect()
    while has_children():
        late = time.monotonic() > deadline
        for pid in descendants(os.getpid()):
            if late or pid not in told:
                told.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.02)
        collect()
    return len(told)


# ---- a private /tmp


def folders_to_keep(root: Path, variables: Mapping[str, str]) -> list[Path]:
    """Folders below /tmp that a part may need: the checkout, Python, its environments, and what a variable names."""
    pythons = [python.resolve().parents[1] for python in root.glob(".envs/*/bin/python") if python.exists()]
    environments = [folder.resolve() for folder in root.glob(".envs/*")]
    named = [
        Path(value)
        for name, values in variables.items()
        if name not in TMP_VARIABLES
        for value in values.split(os.pathsep)
        if os.path.isabs(value) and os.path.isdir(value)
    ]
    kept: list[Path] = []
    for folder in sorted(
        {p.resolve() for p in (root, Path(sys.prefix), Path(sys.base_prefix), *pythons, *environments, *named)}
    ):
        if TMP in folder.parents and not any(outer in folder.parents for outer in kept):
            kept.append(folder)
    return kept


def bind(source: Path, target: Path) -> None:
    """Show a folder at a second place."""
    call("mount", os.fsencode(source), os.fsencode(target), None, ctypes.c_ulong(MS_BIND | MS_REC), None)


def leave_the_mounts_of_others() -> None:
    """Give this process mounts of its own: as root, else as the only user of a user namespace, where it may mount too."""
    user, group = os.geteuid(), os.getegid()
    try:
        call("unshare", CLONE_NEWNS)
    except PermissionError:
        call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    call("mount", None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)


def enter_private_tmp(private: Path, root: Path) -> None:
    """Put a folder in the place of /tmp, for this process and its children; ``root`` is where they are then.

    Raises:
        OSError: if this system does not allow it.
    """
    if root.resolve() == TMP:
        raise OSError(f"the checkout is {TMP} itself")
    kept = folders_to_keep(root, os.environ)
    leave_the_mounts_of_others()
    for folder in kept:
        place = private / folder.relative_to(TMP)
        place.mkdir(parents=True, exist_ok=True)
        bind(folder, place)
    bind(private, TMP)
    os.chdir(root)


def why_no_private_tmp(root: Path, folder: Path) -> str:
    """Try it in a child, with an empty folder; the reason why it cannot be had, or nothing."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            enter_private_tmp(folder, root)
            (TMP / "probe").touch()
        except OSError as error:
            os.write(write, str(error).encode() or b"unknown")
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read, errors="replace") as reason:
        return reason.read()


def make_tmp(job: Job) -> Path:
    """The part's temporary folder: in its own folder, or where its path is short enough for sockets."""
    place = Path(job.folder, "tmp")
    if job.namespace:
        place.mkdir(exist_ok=True)
        place.chmod(0o1777)
    else:
        place.symlink_to(tempfile.mkdtemp(prefix="part-", dir=TMP))
    return place


def remove_tmp(folder: Path) -> None:
    """Remove the temporary folder of the part that has this folder.

    Raises:
        RuntimeError: if something is mounted in it, which would be removed too.
    """
    place = folder / "tmp"
    inside = os.fsencode(place).replace(b" ", b"\\040") + b"/"
    if any(line.split()[4].startswith(inside) for line in Path("/proc/self/mountinfo").read_bytes().splitlines()):
        raise RuntimeError(f"something is mounted in {place}; unmount it first")
    if place.is_symlink():
        shutil.rmtree(place.resolve(), ignore_errors=True)
        place.unlink()
    shutil.rmtree(place, ignore_errors=True)


def discard(folder: Path) -> None:
    """Remove all that a part has left in its folder."""
    remove_tmp(folder)
    shutil.rmtree(folder, ignore_errors=True)


# ---- one part


class Part:
    """The commands of one part while they run."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.tmp = make_tmp(job)
        self.start, self.next_sample, self.peak = time.monotonic(), 0.0, 0

    def run(self) -> Outcome:
        """Run the commands, end what they leave, and measure."""
        rc: int | None = 0
        for command in self.job.commands:
            print("$", shlex.join(command), flush=True)
            rc = self._wait_for(self._fork(command))
            if rc in self.job.fine:
                rc = 0
            if rc != 0:
                break
        wall, left = time.monotonic() - self.start, sweep()
        used = getrusage(RUSAGE_CHILDREN)
        gigabytes = self.peak / 1e9
        return Outcome(
            128 + signal.SIGTERM if rc is None else rc, rc is None, wall, used.ru_utime + used.ru_stime, gigabytes, left
        )

    def _fork(self, command: Sequence[str]) -> int:
        child = os.fork()
        if child:
            return child
        try:
            os.chdir(self.job.root)
            if self.job.namespace:
                enter_private_tmp(self.tmp, Path(self.job.root))
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.execvpe(command[0], command, self._environment())
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(127)

    def _environment(self) -> dict[str, str]:
        private = {} if self.job.namespace else dict.fromkeys(("TMPDIR", "RAY_TMPDIR"), str(self.tmp.resolve()))
        return {name: value for name, value in os.environ.items() if name not in TMP_VARIABLES} | private

    def _wait_for(self, child: int) -> int | None:
        """The exit code of a child, or None when this process is told to stop."""
        while True:
            now = time.monotonic()
            if now - self.start > self.job.limit:
                print(f"\n{self.ran_out()}", flush=True)
                return OVERTIME
            if now >= self.next_sample:
                self._sample()
                self.next_sample = now + min(SAMPLE_SECONDS, 0.2 + (now - self.start) / 2)
            got = signal.sigtimedwait(WATCHED, max(0.0, self.next_sample - now))
            if got and got.si_signo != signal.SIGCHLD:
                return None
            ended = collect()
            if child in ended:
                self._sample()  # what it leaves
                return ended[child]

    def ran_out(self) -> str:
        """What to say at the limit: a hang is found by the processes that it leaves, and by what they last wrote."""
        names = []
        for pid in descendants(os.getpid()):
            with suppress(OSError):
                words = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
                state = Path("/proc", str(pid), "stat").read_bytes().rpartition(b")")[2].split()[0].decode()
                names.append(f"  {pid} {state} {b' '.join(words).decode(errors='replace')[:160]}")
        return "\n".join([f"supervise: over the limit of {self.job.limit:.0f} s, with these processes:", *names])

    def _sample(self) -> None:
        self.peak = max(self.peak, sum(map(memory, descendants(os.getpid()))))


def main() -> None:
    """Do the job that the command line names."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    job = Job(**json.loads(sys.argv[1]))
    adopt_orphans()
    hear_of_the_parents_death()
    if os.getppid() != job.parent:  # it died before it could be heard
        return
    part = Part(job)
    outcome = part.run()
    if outcome.rc == 0:
        remove_tmp(Path(job.folder))
    Path(job.folder, "result.json").write_text(json.dumps(asdict(outcome), indent=2) + "\n")
    sys.exit(outcome.rc != 0)


if __name__ == "__main__":
    main()
