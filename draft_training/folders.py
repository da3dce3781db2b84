"""Folders that belong to a process: whoever kills it, the next one tells them from those in use, and removes them.

A lock of the kernel on the folder itself says that its process lives. It goes with the process, however that ends, and holds in
every container that sees the folder; a process's number is another one there, and is used again. Where a file system has no
such locks (some network ones), nothing is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

#: seconds for which a folder is left alone: it may not be locked yet
_YOUNG_S = 60.0


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Within the block the folder is this process's.

    Raises:
        OSError: if there is no such folder.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # no locks here: then nobody removes it either
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def sweep(parent: Path, pattern: str) -> list[Path]:
    """Remove this user's folders of processes that are gone.

    Args:
        parent: where they lie; may be missing.
        pattern: glob of their names.

    Returns:
        Those that were removed.
    """
    removed = []
    for folder in parent.glob(pattern):
        with contextlib.suppress(OSError):  # in use, or somebody else removes it
            if _abandoned(folder):
                shutil.rmtree(folder)
                removed.append(folder)
    return removed


def _abandoned(folder: Path) -> bool:
    found = folder.lstat()
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not ours or time.time() - found.st_mtime < _YOUNG_S:
        return False
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)
    return True
