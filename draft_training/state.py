"""Saving and restoring a DraftTrainer: draft folder, optimizer state, versions, random stream; verified by digest."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from draft_training.checkpoint import digest, replacing_folder, settled_folder, write_json, write_tensors
from draft_training.errors import CheckpointError, DraftConfigError
from draft_training.files import read_json
from draft_training.weights import read_tensors

if TYPE_CHECKING:
    from draft_training.trainer import DraftTrainer

FORMAT = 1

logger = logging.getLogger(__name__)


def save(trainer: DraftTrainer, path: str | Path, extra: Mapping[str, Any]) -> str:
    """See ``DraftTrainer.save``."""
    own = _own_tensors(trainer)
    with replacing_folder(path) as folder:
        (folder / "draft").mkdir()
        weights = trainer.config.write(folder / "draft", trainer.engine_tensors())
        write_tensors(folder / "trainer.safetensors", own)
        about = {
            "format": FORMAT,
            **_about(trainer),
            "settings": asdict(trainer.settings),
            "draft_digest": weights,
            "trainer_digest": digest(own),
            "extra": dict(extra),
        }
        write_json(folder / "trainer.json", about)
    return weights


def _about(trainer: DraftTrainer) -> dict[str, Any]:
    return {
        "draft_version": trainer.draft_version,
        "policy_version": trainer.policy_version,
        "skipped": trainer.skipped,
        "unroll": trainer.unroll.state_dict(),
        "newborn": trainer._newborn,
    }


def held(trainer: DraftTrainer) -> Saved:
    """What ``save`` would write, from memory."""
    return Saved({**_about(trainer), "extra": {}}, trainer.engine_tensors(), _own_tensors(trainer))


@dataclass(frozen=True)
class Saved:
    """What ``save`` wrote, verified."""

    about: dict[str, Any]  # trainer.json
    weights: dict[str, Tensor]
    own: dict[str, Tensor]  # see ``_own_tensors``


def read(trainer: DraftTrainer, path: str | Path) -> Saved:
    """Read what belongs to a trainer of this shape; see ``DraftTrainer.load`` for what is raised."""
    folder = settled_folder(path)
    about = read_json(folder / "trainer.json")
    if about.get("format") != FORMAT:
        raise CheckpointError(f"{folder} has format {about.get('format')!r}, this version reads {FORMAT}")
    config, weights = trainer.config.read(folder / "draft")
    if config != trainer.config:
        ours, saved = vars(trainer.config), vars(config)
        other = {k: (saved[k], ours[k]) for k in ours if saved[k] != ours[k]}
        raise DraftConfigError(f"the saved draft differs from this one in (saved, ours) {other}; use another folder")
    own = read_tensors(folder / "trainer.safetensors")
    for what, tensors, key in (("draft", weights, "draft_digest"), ("trainer.safetensors", own, "trainer_digest")):
        if digest(tensors) != about[key]:
            raise CheckpointError(f"{folder}: the digest of {what} does not match trainer.json; the checkpoint is torn")
    return Saved(about, dict(weights), dict(own))


def restore(trainer: DraftTrainer, saved: Saved) -> dict[str, Any]:
    """Put it in place; the ``extra`` of ``save``."""
    trainer.install(saved.weights)
    _restore(trainer, saved.own)
    trainer.draft_version = int(saved.about["draft_version"])
    trainer.policy_version = int(saved.about["policy_version"])
    trainer.skipped = int(saved.about["skipped"])
    trainer.unroll.load_state_dict(saved.about.get("unroll", {}))  # none in checkpoints of an earlier version
    trainer._newborn = bool(saved.about.get("newborn", trainer._newborn))
    extra: dict[str, Any] = saved.about["extra"]
    return extra


def _own_tensors(trainer: DraftTrainer) -> dict[str, Tensor]:
    """Optimizer state as ``<kind>.<parameter>``, the random stream and the base rows of a trained head."""
    tensors = trainer._optimizer.state()
    tensors["generator"] = trainer._generator.get_state()
    if trainer._head_base is not None:
        tensors["head_base"] = trainer._head_base
    return tensors


def _restore(trainer: DraftTrainer, tensors: Mapping[str, Tensor]) -> None:
    trainer._generator.set_state(tensors["generator"])
    base = tensors.get("head_base")
    trainer._head_base = None if base is None else base.to(trainer.device)
    if foreign := trainer._optimizer.restore(tensors):
        logger.warning(
            "the checkpoint holds another optimizer's state (AdamW's, of an earlier version) for %d of the draft's matrices: "
            "they keep their weights and begin with Muon afresh",
            len(foreign),
        )
