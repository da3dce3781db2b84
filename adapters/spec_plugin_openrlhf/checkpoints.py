"""Where the plugins' state lies: within OpenRLHF's checkpoint, or beside it until that one is complete.

OpenRLHF calls a checkpoint the latest before it says so: a run that is killed then would resume from it, without the draft. So
ours is written before theirs, and moved into it behind it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_OURS, _WAITING = "spec_plugin", "_spec_plugin"


def waiting(checkpoints: Path, tag: str) -> Path:
    """The folder to save into before OpenRLHF does; what a save that was killed has left there is gone.

    Args:
        checkpoints: OpenRLHF's ``--ckpt.path``.
        tag: of the checkpoint.
    """
    shutil.rmtree(checkpoints / _WAITING, ignore_errors=True)
    return checkpoints / _WAITING / tag


def move_in(checkpoints: Path, tag: str) -> None:
    """OpenRLHF has saved: ``_actor/<tag>/spec_plugin`` is what lay beside; nothing where it has made no checkpoint.

    Raises:
        OSError: if it cannot be moved.
    """
    saved, theirs = checkpoints / _WAITING / tag, checkpoints / "_actor" / tag
    if saved.is_dir() and theirs.is_dir():
        shutil.rmtree(theirs / _OURS, ignore_errors=True)  # of this step, before a run went back
        os.replace(saved, theirs / _OURS)
    shutil.rmtree(checkpoints / _WAITING, ignore_errors=True)


def latest(checkpoints: Path) -> Path:
    """What belongs to the checkpoint that OpenRLHF resumes from; missing if it was saved without.

    Raises:
        OSError: if there is no such checkpoint.
    """
    folder = checkpoints / "_actor"
    tag = (folder / "latest").read_text().strip()
    beside = checkpoints / _WAITING / tag
    return beside if beside.is_dir() else folder / tag / _OURS
