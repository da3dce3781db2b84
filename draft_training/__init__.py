"""draft_training: an EAGLE-3 draft, trained online from hidden states that a policy's forward passes leave behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draft_training.parsing import lazily

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
    from draft_training.proposals import DRAFT_TEMPERATURES, Sampled
    from draft_training.report import Evaluation, SliceReport
    from draft_training.rope import Rope
    from draft_training.settings import TrainSettings
    from draft_training.state import TrainerState
    from draft_training.trainer import DraftTrainer

if not TYPE_CHECKING:  # mypy sees the imports above; all but the configuration needs torch, which takes seconds
    __all__, __getattr__ = lazily(__name__, __file__)
