"""What each figure of the report is called, its unit, and the sentence below it that says how to read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Caption:
    """The words of one figure."""

    title: str
    unit: str
    text: str = ""


ACCEPTANCE = Caption(
    "Acceptance length",
    "tokens per forward pass",
    "Tokens that come from each forward pass of the policy; 1 is no gain. Drafting pays above the dashed lines. "
    "The promise of a step is for the next one's draft.",
)
POSITIONS = Caption(
    "Acceptance by position",
    "drafted token",
    "Share of the verification steps in which the first, second, … drafted token was accepted. "
    "What was not drafted counts as not accepted.",
)
SPEED = Caption(
    "Decoding, predicted and realised",
    "times plain",
    "By the engine's own step times, plain steps being 1. A whole rollout gains less: prefill and waiting are in it, too. "
    "A predicted 1 is a try of which nothing was promised.",
)
SPEED_LATE = " The prediction is for the rollout in progress; what it realised is logged a step later."
KS = Caption(
    "Tokens drafted, by batch size",
    "requests at once",
    "k, as the controller chose it for each batch size; the engine follows it as the batch drains. 0: no drafts.",
)
LOSS = Caption(
    "Draft: loss",
    "nats",
    "Loss of each slice of draft training. It grows when more tokens are unrolled, and when the policy moves.",
)
VERSION = Caption(
    "Draft: version in the engine",
    "version",
    "The draft that the engine serves. It stands still where training made no step, or where a refresh was refused.",
)
STAGES = Caption("Where a step's time goes", "seconds", "As the trainer times it.")
STAGES_WITH = (
    " Draft training is part of the policy's update, a refresh part of the weight sync, harvest part of the log-probs."
)
WORK = Caption("The plugin's own work", "% of the step")
LOG_PROBS = Caption(
    "Log-probs: engine against actor",
    "nats",
    "Differences of the log-probs that enter the loss. The tolerance is for the mean of a stretch of text.",
)
LOG_PROBS_OLDER = (
    " It holds for text of the present policy; older text differs by what the policy has moved, and is held against plain text "
    "of the same age."
)
LAG = Caption("Policy lag", "versions", "Policy versions between sampling and training, mean of the step's tokens.")
THINNED = (
    "Of many steps, a line shows the median of {size} neighbouring ones; what is light around it reaches from the smallest "
    "to the largest of them."
)
#: one line for each run, by metric
LINES = {
    "ms_per_token": Caption("Generation, per token", "ms"),
    "generation_s": Caption("Generation, as far as the trainer waits", "seconds"),
    "step_s": Caption("Whole step", "seconds"),
    "spec/acceptance_length": Caption("Acceptance length", "tokens per forward pass"),
    "spec/speedup_realised": Caption("Decoding, realised", "times plain"),
    "reward": Caption("Reward", "mean"),
    "response_tokens": Caption("Response length", "tokens"),
    "lr": Caption("Learning rate of the policy", ""),
}
#: those of a run that is alone on the page
LINES_ALONE = ("reward", "response_tokens", "lr")
