"""A draft before the run: rollouts of the policy, harvested and trained on with the code of the trainers."""

from spec_plugin.commands.train.run import TrainedDraft, pretrain
from spec_plugin.commands.train.settings import PretrainSettings

__all__ = ["PretrainSettings", "TrainedDraft", "pretrain"]
