"""draft_training: an EAGLE-3 draft, trained online from hidden states that a policy's forward passes leave behind."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draft_training.batch import Document, PackedBatch, pack
    from draft_training.buffer import HiddenBuffer
    from draft_training.checkpoint import digest, digest_like, fingerprint, row_digests
    from draft_training.config import DraftConfig, validate_draft
    from draft_training.eagle3 import load_draft, save_draft
    from draft_training.errors import CheckpointError, DraftConfigError, OtherRankFailed
    from draft_training.kinds import kind_of
    from draft_training.loss import LossStats, ttt_loss
    from draft_training.memory import TrainingMemory, training_memory
    from draft_training.model import Eagle3Draft
    from draft_training.report import SliceReport
    from draft_training.rope import Rope
    from draft_training.settings import TrainSettings
    from draft_training.state import TrainerState
    from draft_training.trainer import DraftTrainer

#: where each name lives; it is imported when it is first used, since all but the configuration needs torch, which takes seconds.
#: A test holds the table against the imports above, which are for type checkers.
_HOMES: dict[str, str] = {
    "batch": "Document PackedBatch pack",
    "buffer": "HiddenBuffer",
    "checkpoint": "digest digest_like fingerprint row_digests",
    "config": "DraftConfig validate_draft",
    "eagle3": "load_draft save_draft",
    "errors": "CheckpointError DraftConfigError OtherRankFailed",
    "kinds": "kind_of",
    "loss": "LossStats ttt_loss",
    "memory": "TrainingMemory training_memory",
    "model": "Eagle3Draft",
    "report": "SliceReport",
    "rope": "Rope",
    "settings": "TrainSettings",
    "state": "TrainerState",
    "trainer": "DraftTrainer",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_HOME_OF)

if not TYPE_CHECKING:  # mypy sees the imports above, and so a name that is not there

    def __getattr__(name: str) -> Any:
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(f"draft_training.{home}"), name)
        return found
