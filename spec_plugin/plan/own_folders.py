"""Temporary folders of this process: only this user can read them, and where it is killed, the next run removes them."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from draft_training.folders import claimed, sweep

logger = logging.getLogger(__name__)

_PREFIX = "spec-plugin.own."
#: bytes that a file of ours leaves free: other processes write there, too
_SPARE = 32 << 20


def memory() -> Path:
    """A folder in memory; on the disk where there is none."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else disk()


def place_for(size: int) -> Path:
    """Where a file goes that somebody reads at once: into memory if it has room, else onto the disk.

    A container's shared memory is 64 MB unless it was started with more, which is less than most drafts.

    Args:
        size: of the file in bytes.

    Raises:
        OSError: if neither has room; says how much they have, and what to do.
    """
    places = dict.fromkeys((memory(), disk()))
    found = next((place for place in places if _free(place) >= size + _SPARE), None)
    if found is None:
        has = " and ".join(f"{place} ({_free(place) >> 20} MB free)" for place in places)
        raise OSError(
            errno.ENOSPC,
            f"a file of {-(-size >> 20)} MB, and {_SPARE >> 20} MB to spare, do not fit into {has}: start the container with "
            "more shared memory (docker run --shm-size=16g), or set TMPDIR to a folder that has the room",
        )
    if found != memory():
        _say_disk(memory(), found)
    return found


def _free(place: Path) -> int:
    """Bytes that this user may still write there; 0 where nobody can tell."""
    try:
        room = os.statvfs(place)
    except OSError:
        return 0
    return room.f_bavail * room.f_frsize


@cache  # once in a process
def _say_disk(shared: Path, place: Path) -> None:
    logger.info(
        "spec-plugin: %s has %d MB free, too few for what is handed over in files: they go through %s. More shared memory "
        "(docker run --shm-size) is faster",
        *(shared, _free(shared) >> 20, place),
    )


def disk() -> Path:
    """The system's folder for temporary files (``TMPDIR``)."""
    return Path(tempfile.gettempdir())


@contextmanager
def own_folder(where: Path) -> Iterator[Path]:
    """A new folder, for the block.

    Args:
        where: in which it is made.

    Raises:
        OSError: if it cannot be made.
    """
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=where) as name, claimed(Path(name)):
        yield Path(name)


def sweep_own() -> None:
    """Remove what processes that were killed have left behind, and say so in one line."""
    removed = [folder for where in {memory(), disk()} for folder in sweep(where, f"{_PREFIX}*")]
    if removed:
        names = ", ".join(map(str, removed))
        logger.info("spec-plugin: removed %d folders of processes that were killed: %s", len(removed), names)
