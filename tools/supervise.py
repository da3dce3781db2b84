"""Run one part of the checks so that nothing of it stays; ``check.py`` starts one such process per part.

Where the kernel allows it, this process is the first one of a PID namespace (``namespace``): when it ends, however it ends, the
kernel ends all that it started. Elsewhere (most containers, systems that keep namespaces from ordinary users) it is a subreaper:
daemons leave their session and their parent, but an orphan comes back to the nearest subreaper among its ancestors, so all that
is left when the part's commands have ended, or when SIGTERM comes, is found among its descendants. Linux, util-linux 2.32 and
the standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
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

UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
USERS = ((), ("--user", "--map-root-user"))  # as root; as any user
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Job:
    """What a supervisor is to do; it comes as JSON on its command line."""

    commands: list[list[str]]  # one after the other, up to the first that fails
    fine: list[int]  # exit codes of a command that passed
    root: str  # the checkout, where they run
    folder: str  # for ``tmp`` and ``result.json``; the log is standard output
    private: bool  # whether this process's /tmp is the part's own
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


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process.

    Raises:
        OSError: if the kernel refuses it.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value)) == -1:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def adopt_orphans() -> None:
    """Let the orphans among the descendants become children of this process."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def hear_of_the_parents_death(by: signal.Signals = signal.SIGTERM) -> None:
    """Get a signal when the thread that started this process is gone; it stays so when the process executes a program."""
    prctl(PR_SET_PDEATHSIG, by)


def tied_to_this_process(private: bool) -> Callable[[], None]:
    """What a supervisor does before its program begins, so that it ends when this process does."""
    parent = os.getpid()

    def tie() -> None:
        # unshare ignores SIGTERM; the kernel ends the namespace with it
        hear_of_the_parents_death(signal.SIGKILL if private else signal.SIGTERM)
        if os.getppid() != parent:  # it died before it could be heard
            os._exit(1)

    return tie


# ---- processes


def stat(pid: int | str) -> list[bytes]:
    """What the kernel says of a process, from its state and its parent's id on.

    Raises:
        OSError: if it has ended.
    """
    return Path("/proc", str(pid), "stat").read_bytes().rpartition(b")")[2].split()


def descendants(ancestor: int) -> list[int]:
    """Process ids of all children, their children, and so on."""
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it may have ended meanwhile
            children.setdefault(int(stat(entry)[1]), []).append(int(entry))
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


def collect() -> dict[int, int] | None:
    """Exit codes of the children that have ended, each once, whose CPU time counts from now on; None without children."""
    ended: dict[int, int] = {}
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    except ChildProcessError:
        return ended or None
    return ended


def sweep(seconds: float = SECONDS_TO_END) -> int:
    """End all descendants, with SIGKILL those that SIGTERM did not end in that time; return how many there were.

    Every chain of descendants begins at a child of this process, so without children there are none.
    """
    deadline = time.monotonic() + seconds
    told: set[int] = set()
    while collect() is not None:
        late = time.monotonic() > deadline
        for pid in descendants(os.getpid()):
            if late or pid not in told:
                told.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.02)
    return len(told)


# ---- namespaces, with a private /tmp


def folders_to_keep(root: Path, variables: Mapping[str, str]) -> list[Path]:
    """Folders below /tmp that a part may need: the checkout, Python, its environments, and what a variable names."""
    tools = Path(__file__).resolve().parents[1]
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
        {p.resolve() for p in (root, tools, Path(sys.prefix), Path(sys.base_prefix), *pythons, *environments, *named)}
    ):
        if TMP in folder.parents and not any(outer in folder.parents for outer in kept):
            kept.append(folder)
    return kept


def namespace(user: Sequence[str], private: Path, root: Path) -> list[str]:
    """The beginning of a command that then runs in namespaces of its own, with a /tmp and a /dev/shm of its own.

    What is in memory ends with the namespace; and OpenMP names files there by process ids, which are the same in each.

    Args:
        user: one of ``USERS``.
        private: a folder for /tmp; places for what must stay to be seen are made in it.
        root: the checkout.
    """
    places = [(folder, private / folder.relative_to(TMP)) for folder in folders_to_keep(root, os.environ)]
    for _, place in places:
        place.mkdir(parents=True, exist_ok=True)
    binds = [shlex.join(["mount", "--rbind", *map(str, pair)]) for pair in [*places, (private, TMP)]]
    script = " && ".join([*binds, "mount -t tmpfs -o mode=1777 tmpfs /dev/shm", 'exec "$@"'])
    return [*UNSHARE, *user, "sh", "-c", script, "sh"]


def user_for_namespaces(root: Path, folder: Path) -> Sequence[str]:
    """Which of ``USERS`` can have namespaces here; it is tried, with an empty folder.

    Raises:
        OSError: with the reason, if none.
    """
    reason = f"the checkout is {TMP} itself"
    for user in USERS if root.resolve() != TMP else ():
        done = subprocess.run([*namespace(user, folder, root), "touch", TMP / "probe"], capture_output=True, text=True)
        if done.returncode == 0:
            return user
        reason = done.stderr.strip() or f"unshare ends with {done.returncode}"
    raise OSError(reason)


def make_tmp(folder: Path, private: bool) -> Path:
    """A part's temporary folder: in its own folder, or where its path is short enough for sockets."""
    place = folder / "tmp"
    if private:
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


class RunningPart:
    """The commands of one part while they run."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.start, self.next_sample, self.peak = time.monotonic(), 0.0, 0

    def run(self) -> Outcome:
        """Run the commands, end what they leave, and measure."""
        rc: int | None = 0
        for command in self.job.commands:
            print("$", shlex.join(command), flush=True)
            try:
                rc = self._wait_for(self._begin(command))
            except OSError as error:
                print(error, flush=True)
                rc = 127
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

    def _begin(self, command: Sequence[str]) -> int:
        os.chdir(self.job.root)
        return os.posix_spawnp(command[0], command, self._environment(), setsigmask=())

    def _environment(self) -> dict[str, str]:
        tmp = str(Path(self.job.folder, "tmp").resolve())
        own = {} if self.job.private else dict.fromkeys(("TMPDIR", "RAY_TMPDIR"), tmp)
        return {name: value for name, value in os.environ.items() if name not in TMP_VARIABLES} | own

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
            ended = collect() or {}
            if child in ended:
                self._sample()  # what it leaves
                return ended[child]

    def ran_out(self) -> str:
        """What to say at the limit: a hang is found by the processes that it leaves, and by what they last wrote."""
        names = []
        for pid in descendants(os.getpid()):
            with suppress(OSError):
                words = Path("/proc", str(pid), "cmdline").read_bytes().split(b"\0")
                names.append(f"  {pid} {stat(pid)[0].decode()} {b' '.join(words).decode(errors='replace')[:160]}")
        return "\n".join([f"supervise: over the limit of {self.job.limit:.0f} s, with these processes:", *names])

    def _sample(self) -> None:
        self.peak = max(self.peak, sum(map(memory, descendants(os.getpid()))))


def main() -> None:
    """Do the job that the command line names."""
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    job = Job(**json.loads(sys.argv[1]))
    adopt_orphans()
    outcome = RunningPart(job).run()
    Path(job.folder, "result.json").write_text(json.dumps(asdict(outcome), indent=2) + "\n")
    sys.exit(outcome.rc != 0)


if __name__ == "__main__":
    main()
