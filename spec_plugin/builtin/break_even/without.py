"""How long a rollout's decoding would have taken without drafts, from its own steps."""

from __future__ import annotations

from collections.abc import Sequence

from spec_plugin.builtin.break_even.cost import StepCost, tokens_per_step
from spec_plugin.events import RolloutStats


def times_as_long(stats: RolloutStats, cost: StepCost, acceptance: Sequence[float]) -> float | None:
    """The rollout's decoding time without drafts over what it was; below 1 where drafts cost more than they saved.

    A step of b requests that made n tokens of each stands for n plain steps of b requests: what fell to the busy moments of the
    machine cancels, since both are of the same moment.

    Args:
        stats: of the rollout.
        cost: seconds of a step, as far as can be told as the pairs have found them.
        acceptance: chance of each position; says how the rollout's own tokens a step divide among several k.

    Returns:
        None where the engine has timed no steps.
    """
    drafted = [s for s in stats.steps if s.k > 0]
    forwards = sum(s.batch * s.steps for s in drafted)
    expected = sum(s.batch * s.steps * (tokens_per_step(acceptance, s.k) - 1.0) for s in drafted)
    found = (stats.tokens_per_forward or 1.0) - 1.0  # drafted tokens that were accepted, for each forward
    scale = found * forwards / expected if expected > 0.0 else 0.0
    took = without = 0.0
    for s in stats.steps:
        context, tokens = s.context or None, 1.0
        if s.k > 0:
            tokens += scale * (tokens_per_step(acceptance, s.k) - 1.0) if expected > 0.0 else found
        seconds = s.seconds * s.steps + s.mixed_seconds
        took += seconds
        if s.k > 0 or not s.paused:
            plain, own = cost.seconds(s.batch, 0, context=context), cost.seconds(s.batch, s.k, False, context)
            seconds *= tokens * plain / own
        without += seconds
    return without / took if took > 0.0 else None
