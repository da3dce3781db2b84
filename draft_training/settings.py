"""TrainSettings: how a draft is trained."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainSettings:
    """Numbers of one training; the defaults are for a draft that is trained online, beside a policy that moves."""

    lr: float = 0.1  # highest of matrices: size of an update's singular values, see Muon
    vector_lr: float = 1e-3  # of norms, and of matrices whose rows are tokens (AdamW)
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's
    weight_decay: float = 0.5  # of matrices, as a share of lr: what a policy that moves asks for
    grad_clip: float = 1.0  # norm of the draft's own gradients
    ttt_steps: int = 3  # most unrolled steps of the training-time test; the engine's k
    first_steps: int = 3  # unrolled in most optimizer steps, see ``TrainingSchedule.unroll``
    chain_smoothing: float | None = 0.5  # of the weights by what hangs on a position, see ``chains``; None: all alike
    logit_cap: float | None = None  # of the target's logits, see ``outside.logit_cap``
    tokens_per_step: int = 1024  # per optimizer step and rank, where first_steps are unrolled
    context_share: float = 1.0  # of so many sampled tokens, those read that teach a young draft, see ``with_context``
    replay_share: float = 0.25  # share of older policy versions in a step
    warmup_steps: int = 10  # linear
    decay_steps: float = 30.0  # steps from which an untrained draft's rates fall as 1 / sqrt
    lr_floor: float = 0.15  # share of the rates that is kept for ever: online training has no end to decay towards
    offload: bool = False  # optimizer state and the policy's copies lie in the host's memory between slices
