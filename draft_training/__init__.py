"""draft_training: an EAGLE-3 draft, trained online from hidden states that a policy's forward passes leave behind."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draft_training.batch import Document as Document
    from draft_training.batch import PackedBatch as PackedBatch
    from draft_training.batch import pack as pack
    from draft_training.buffer import HiddenBuffer as HiddenBuffer
    from draft_training.checkpoint import digest as digest
    from draft_training.checkpoint import digest_like as digest_like
    from draft_training.checkpoint import fingerprint as fingerprint
    from draft_training.checkpoint import row_digests as row_digests
    from draft_training.config import DraftConfig as DraftConfig
    from draft_training.config import validate_draft as validate_draft
    from draft_training.eagle3 import load_draft as load_draft
    from draft_training.eagle3 import save_draft as save_draft
    from draft_training.errors import CheckpointError as CheckpointError
    from draft_training.errors import DraftConfigError as DraftConfigError
    from draft_training.errors import OtherRankFailed as OtherRankFailed
    from draft_training.kinds import kind_of as kind_of
    from draft_training.loss import LossStats as LossStats
    from draft_training.loss import ttt_loss as ttt_loss
    from draft_training.memory import TrainingMemory as TrainingMemory
    from draft_training.memory import training_memory as training_memory
    from draft_training.model import Eagle3Draft as Eagle3Draft
    from draft_training.report import SliceReport as SliceReport
    from draft_training.rope import Rope as Rope
    from draft_training.settings import TrainSettings as TrainSettings
    from draft_training.state import TrainerState as TrainerState
    from draft_training.trainer import DraftTrainer as DraftTrainer

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
