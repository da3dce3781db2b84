"""A command with a /tmp, a /dev/shm and process ids of its own: ``unshare``, and what of /tmp must stay to be seen.

verl and Ray have fixed names in /tmp. When the first process in there ends, however it ends, the kernel ends all others; and it
is ended when ``unshare`` is. Linux, util-linux 2.32 and the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TMP = Path("/tmp").resolve()
TMP_VARIABLES = ("TMPDIR", "TMP", "TEMP", "RAY_TMPDIR")
UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
USERS = ((), ("--user", "--map-root-user"))  # as root; as any user


def die_with_the_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Get a signal when the thread that started this process ends; it stays so when the process executes a program."""
    _prctl(1, by)  # PR_SET_PDEATHSIG


def adopt_orphans() -> None:
    """Let the orphans among the descendants become children of this process; it stays so when it executes a program."""
    _prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value)) == -1:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def inside(user: Sequence[str], private: Path, root: Path) -> list[str]:
    """The beginning of a command that then runs in namespaces of its own.

    What is in its /dev/shm ends with the namespace; and OpenMP names files there by process ids, which are the same in each.

    Args:
        user: one of ``USERS``.
        private: a folder for /tmp; places for what must stay to be seen are made in it.
        root: the checkout.
    """
    private.mkdir(parents=True, exist_ok=True)
    private.chmod(0o1777)
    places = [(folder, private / folder.relative_to(TMP)) for folder in _folders_to_keep(root)]
    for _, place in places:
        place.mkdir(parents=True, exist_ok=True)
    binds = [shlex.join(["mount", "--rbind", *map(str, pair)]) for pair in [*places, (private, TMP)]]
    script = " && ".join([*binds, "mount -t tmpfs -o mode=1777 tmpfs /dev/shm", 'exec "$@"'])
    return [*UNSHARE, *user, "sh", "-c", script, "sh"]


def _folders_to_keep(root: Path) -> list[Path]:
    """Folders below /tmp that a command may need: the checkout, Python, its environments, and what a variable names."""
    named = [
        part for name, value in os.environ.items() if name not in TMP_VARIABLES for part in value.split(os.pathsep)
    ]
    environments = [
        str(part) for path in root.glob(".envs/*") for part in (path, (path / "bin/python").resolve().parents[1])
    ]
    candidates = (str(root), str(Path(__file__).parents[1]), sys.prefix, sys.base_prefix, *environments, *named)
    found = {Path(path).resolve() for path in candidates if os.path.isabs(path) and os.path.isdir(path)}
    below = {folder for folder in found if TMP in folder.parents}
    return sorted(folder for folder in below if below.isdisjoint(folder.parents))


def user_for_namespaces(root: Path, folder: Path) -> Sequence[str]:
    """Which of ``USERS`` can have namespaces here; it is tried, with an empty folder.

    Raises:
        OSError: with the reason, if none.
    """
    reason = f"the checkout is {TMP} itself"
    for user in USERS if root.resolve() != TMP else ():
        done = subprocess.run([*inside(user, folder, root), "touch", TMP / "probe"], capture_output=True, text=True)
        if done.returncode == 0:
            return user
        reason = done.stderr.strip() or f"unshare ends with {done.returncode}"
    raise OSError(reason)
