"""A trainer step from its stages (generation, log-probs, training), and which of them overlap at a lag."""

from __future__ import annotations

from dataclasses import dataclass

from spec_plugin_projection.constants import Constants
from spec_plugin_projection.hardware import Card
from spec_plugin_projection.shapes import ModelShape

#: forward passes that a backward pass costs: products with weights and with activations
_BACKWARD = 2.0
#: bytes of a weight while the trainer multiplies
_TRAINING_BYTES = 2


@dataclass(frozen=True)
class Stages:
    """Seconds of one trainer step, by stage."""

    prepare: float  # weight sync and preparation
    generation: float
    logprob: float
    training: float
    draft: float = 0.0  # draft training and refresh

    @property
    def trainer(self) -> float:
        """Seconds of the stages that run on the trainer's GPUs."""
        return self.logprob + self.training + self.draft


def trainer_seconds(
    model: ModelShape, card: Card, gpus: int, tokens: float, length: float, constants: Constants, passes: int = 1
) -> tuple[float, float]:
    """Seconds of the log-prob passes, and of forward and backward passes.

    Args:
        model: the policy.
        card: of the trainer.
        gpus: how many.
        tokens: of prompts and responses, of all sequences of a step.
        length: mean tokens of a sequence, weighted by tokens: attention reads half of it on average.
        constants: which share of the peak is reached.
        passes: log-prob passes; two where a reference model is asked as well.
    """
    forward = tokens * model.forward_flops(length / 2)
    rate = gpus * card.flops_of(_TRAINING_BYTES) * constants.training_reached
    return passes * forward / rate, (1 + _BACKWARD) * constants.recomputation * forward / rate


def step_seconds(stages: Stages, lag: int = 0) -> float:
    """Seconds from one policy version to the next.

    At lag 0 stages follow each other. With rollouts that are L versions ahead they overlap with what the trainer does: the slower
    of both decides, and the weight sync stands between.
    """
    if lag == 0:
        return stages.prepare + stages.generation + stages.trainer
    return stages.prepare + max(stages.generation, stages.trainer)


def exposed_seconds(stages: Stages, lag: int = 0) -> float:
    """Seconds of generation that the trainer waits for."""
    return stages.generation if lag == 0 else max(0.0, stages.generation - stages.trainer)
