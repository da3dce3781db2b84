"""Temporary folders of this process: only this user can read them, and where it is killed, the next run removes them."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draft_training.folders import claimed, sweep

logger = logging.getLogger(__name__)

_PREFIX = "spec-plugin.own."


def memory() -> Path:
    """A folder in memory; on the disk where there is none."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else disk()


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
