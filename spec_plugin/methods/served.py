"""The folder from which the engine loads the starting draft: one name for one draft, from run to run.

vLLM's compile cache is keyed by the draft's path, among other things (0.29 ``ModelConfig.compute_hash``, by way of
``SpeculativeConfig``): in a folder with a random name the engine would compile everything again at each start. So drafts lie
beside that cache, in folders named after what is in them, written by us and read back before they are used again.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from spec_plugin.api.method import StartingDraft
from spec_plugin.plan.own_folders import disk, own_folder

if TYPE_CHECKING:  # an untrained draft is judged without torch, whose import takes seconds
    from torch import Tensor

    from draft_training.draft import DraftShape

logger = logging.getLogger(__name__)

#: what to do where vLLM's class for the target hands out no hidden states
INSTEAD = (
    "set spec.method to suffix, ngram or draft_model, which work with any target, or to auto, which chooses among them"
)

#: drafts that stay, and seconds for which one that was used stays in any case
_KEPT, _FRESH = 4, 86_400.0


def starting_folder(start: StartingDraft, seed: int, dtype: str) -> Path:
    """The starting draft, as the engine loads it."""
    import torch

    from draft_training import DraftTrainer, TrainSettings

    trainer = DraftTrainer(start.config, TrainSettings(), device="cpu", seed=seed, tensors=start.tensors)
    return served_folder(start.config, trainer.engine_tensors(getattr(torch, dtype)))


def served_folder(config: DraftShape, tensors: Mapping[str, Tensor]) -> Path:
    """A folder with this draft in vLLM's own layout; nobody else's files are ever loaded.

    Where the cache cannot be used (not writable, or others may write to it) it is a folder of this process.
    """
    from draft_training import digest, kind_of
    from draft_training.checkpoint import replacing_folder

    kind, of = kind_of(config), digest(tensors)
    name = hashlib.sha256(f"{json.dumps(config.to_hf(), sort_keys=True)}{of}".encode()).hexdigest()[:24]
    try:
        root = cache_root()
        folder = root / name
        if not _holds(folder, of):
            try:
                with replacing_folder(folder) as fresh:
                    kind.write(fresh, tensors)
            except OSError:
                if not _holds(folder, of):  # another engine of this machine has not written it meanwhile
                    raise
        os.utime(folder)
        _prune(root, folder)
    except OSError as error:
        logger.info("spec-plugin: the draft's folder cannot be kept, so the next run compiles again: %s", error)
        until_the_end = ExitStack()
        atexit.register(until_the_end.close)
        folder = until_the_end.enter_context(own_folder(disk()))
        kind.write(folder, tensors)
    return folder


def cache_root() -> Path:
    """Where drafts are kept: beside vLLM's own caches.

    Raises:
        OSError: if the folder cannot be made, or is not this user's alone.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(os.environ.get("VLLM_CACHE_ROOT") or Path(home) / "vllm") / "spec_plugin"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = root.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or root.is_symlink():
        raise PermissionError(
            f"{root} belongs to another user, is a link, or can be written by others; make it this user's alone"
        )
    return root


def _holds(folder: Path, digest_of: str) -> bool:
    """Is this draft there, complete and unchanged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from draft_training import digest

    try:
        return (folder / "config.json").is_file() and digest(load_file(folder / "model.safetensors")) == digest_of
    except (OSError, SafetensorError):
        return False


def _prune(root: Path, used: Path) -> None:
    ages: dict[Path, float] = {}
    for folder in root.iterdir():
        with suppress(FileNotFoundError):  # another engine's, which has just got its name
            ages[folder] = time.time() - folder.stat().st_mtime
    for old in sorted(ages.keys() - {used}, key=ages.__getitem__)[_KEPT - 1 :]:
        if ages[old] > _FRESH:
            shutil.rmtree(old, ignore_errors=True)
