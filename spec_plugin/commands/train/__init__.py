"""A draft before the run: rollouts of the policy, harvested and trained on with the code of the trainers."""

from spec_plugin.commands.train.run import Outcome, pretrain
from spec_plugin.commands.train.settings import PretrainSettings

__all__ = ["Outcome", "PretrainSettings", "pretrain"]
