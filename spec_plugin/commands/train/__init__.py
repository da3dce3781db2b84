"""A draft before the run: trained on hidden states of the policy's own rollouts, with the code that a run uses."""

from spec_plugin.commands.train.run import TrainedDraft, pretrain
from spec_plugin.commands.train.settings import PretrainSettings

__all__ = ["PretrainSettings", "TrainedDraft", "pretrain"]
