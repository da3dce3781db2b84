"""draft_training: an EAGLE-3 draft, trained online from hidden states that a policy's forward passes leave behind."""

from draft_training.batch import Document, PackedBatch, pack
from draft_training.buffer import BufferStats, HiddenBuffer
from draft_training.checkpoint import CheckpointError, digest, load_draft, save_draft
from draft_training.config import DraftConfig, DraftConfigError, Rope, validate_draft
from draft_training.loss import LossStats, ttt_loss
from draft_training.model import Eagle3Draft
from draft_training.trainer import DraftTrainer, OtherRankFailed, SliceReport, TrainSettings

__all__ = [
    "BufferStats",
    "CheckpointError",
    "Document",
    "DraftConfig",
    "DraftConfigError",
    "DraftTrainer",
    "Eagle3Draft",
    "HiddenBuffer",
    "LossStats",
    "OtherRankFailed",
    "PackedBatch",
    "Rope",
    "SliceReport",
    "TrainSettings",
    "digest",
    "load_draft",
    "pack",
    "save_draft",
    "ttt_loss",
    "validate_draft",
]
