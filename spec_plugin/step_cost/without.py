"""How long a rollout would have taken without drafts, from its own steps: what is to be expected of it, and at most."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_plugin.events import RolloutStats
from spec_plugin.step_cost.bands import bands_of
from spec_plugin.step_cost.chances import tokens_per_step
from spec_plugin.step_cost.fit import Kinds, Numbers
from spec_plugin.step_cost.model import StepCost

#: rollouts that are remembered of a run's own load
_ROLLOUTS = 16


@dataclass(frozen=True)
class _Steps:
    """Steps of several kinds, alike (``StepTiming``) or not (``MixedSteps``), [n] each."""

    seconds: Numbers  # of all of a kind
    steps: Numbers
    tokens: Numbers  # of a request with a draft, in each
    share: Numbers  # of their requests that had one
    prompts: NDArray[np.bool_]
    plain: Numbers  # seconds of a plain step in the place of one of them, by the cost model
    own: Numbers  # of one of them, by the cost model, were no prompts read

    @property
    def stands_for(self) -> Numbers:
        """Plain steps that make as many tokens as one of them."""
        return 1.0 + self.share * (self.tokens - 1.0)


class OwnLoad:
    """By what factor a run's own work beside the engine makes its drafted steps longer than the start-up has timed them.

    Requests are taken in, answers handed out and scored while the engine steps. That is as much work without drafts, spread over
    more steps: it adds the same seconds to both, and does not multiply them as somebody else's load does. It is there in every
    rollout; so it is told by those that were disturbed least.
    """

    def __init__(self) -> None:
        """No rollout was seen."""
        self._slow: deque[float] = deque(maxlen=_ROLLOUTS)

    def note(self, stats: RolloutStats, cost: StepCost, acceptance: Sequence[float]) -> None:
        """A rollout that drafted is over; arguments as for ``times_as_long``."""
        slow = _slow(_all(stats, cost, acceptance))
        if slow is not None and math.isfinite(slow):
            self._slow.append(slow)

    @property
    def factor(self) -> float:
        """1 where there is none."""
        return max(1.0, sorted(self._slow)[len(self._slow) // 4]) if self._slow else 1.0


def times_as_long(
    stats: RolloutStats, cost: StepCost, acceptance: Sequence[float], own_load: float = 1.0
) -> float | None:
    """Seconds of all the rollout's steps without drafts over what they were; below 1 where drafts cost more than they saved.

    A step of b requests that made n tokens of each, in the mean, stands for n plain steps of b requests: what fell to the busy
    moments of the machine cancels, since both are of the same moment. Of a step that read prompts, too, only as much counts so as
    it would have taken without them, on a machine as busy as the rollout found it: prompts are read either way.

    Args:
        stats: of the rollout.
        cost: seconds of a step, as far as can be told as the pairs have found them.
        acceptance: chance of each position; says how the rollout's own tokens a step divide among several k.
        own_load: ``OwnLoad.factor``.

    Returns:
        None where the engine has timed no steps.
    """
    found = _all(stats, cost, acceptance)
    slow = _slow(found) or 1.0
    decoding = np.where(found.prompts, np.minimum(found.seconds, found.steps * found.own * slow), found.seconds)
    ratio = (found.stands_for * found.plain / found.own + own_load - 1.0) / own_load
    # a step without a draft's tokens saves nothing, whatever two measurements of busy moments say of the draft's own pass
    ratio = np.where(found.share > 0.0, ratio, np.minimum(1.0, ratio))
    return _over(decoding * ratio + (found.seconds - decoding), found.seconds)


def times_as_long_at_most(stats: RolloutStats, cost: StepCost, acceptance: Sequence[float]) -> float | None:
    """Seconds of all the rollout's steps without drafts over what they were, at most.

    While a request of the control group makes one token, another makes several, and it may be that one for which the rollout
    waits: a step stands for as many plain ones as a request with a draft made tokens, in steps of as many requests or in all of
    the rollout's, whichever is more: a few steps at a size may by chance have shown few. Each takes what the cost model says, and
    longer where the rollout's steps took longer than it says, but no longer than the step itself. Prompts are read once.

    Args:
        stats: of the rollout.
        cost: as for ``times_as_long``.
        acceptance: as there.

    Returns:
        None where the engine has timed no steps.
    """
    found = _all(stats, cost, acceptance, at_most=True)
    slow = max(1.0, _slow(found) or float("inf"))
    plain = np.where(found.share > 0.0, np.minimum(found.seconds, found.steps * found.plain * slow), found.seconds)
    return _over(np.where(found.prompts, found.seconds, plain) + plain * (found.tokens - 1.0), found.seconds)


def _slow(found: _Steps) -> float | None:
    """By what factor steps without prompts took longer than the cost model says; None: there were none."""
    decoding = ~found.prompts
    return _over(found.seconds[decoding], (found.steps * found.own)[decoding])


def _over(one: Numbers, other: Numbers) -> float | None:
    """The sum of one over the sum of the other; None where there is nothing."""
    of_all = float(other.sum())
    return float(one.sum()) / of_all if of_all > 0.0 else None


def _all(stats: RolloutStats, cost: StepCost, acceptance: Sequence[float], at_most: bool = False) -> _Steps:
    alike = [
        (s.batch, s.k, s.paused, s.context, s.seconds * s.steps, s.steps, s.forwards * (s.k > 0), float(s.k > 0), False)
        for s in stats.steps
    ]
    mixed = [
        (
            m.batch,
            m.k,
            False,
            m.context,
            m.seconds,
            m.steps,
            m.drafted,
            min(1.0, m.drafted / (m.batch * m.steps)),
            m.prompts,
        )
        for m in stats.mixed
    ]
    columns = np.array(alike + mixed, np.float64).reshape(-1, 9).T
    batch, k, paused, context, seconds, steps, drafted, share, prompts = columns
    kinds = Kinds.of(batch, k, paused > 0.0, np.where(context >= 1.0, context, math.nan))
    plain, own = _plain_and_own(kinds, share, cost, at_most)
    tokens = np.where(share > 0.0, _tokens_made(stats, bands_of(batch), k, drafted, acceptance, at_most), 1.0)
    return _Steps(seconds, steps, tokens, share, prompts > 0.0, plain, own)


def _plain_and_own(kinds: Kinds, share: Numbers, cost: StepCost, at_most: bool) -> tuple[Numbers, Numbers]:
    """Of a plain step, and of such a one: what is verified is of those requests that have a draft, its passes are for all.

    Args:
        kinds: of steps.
        share: of their requests that have a draft, [n].
        cost: as for ``times_as_long``.
        at_most: is a pass for all taken to be no longer than one that only reads.
    """
    nothing, always = np.zeros_like(kinds.k), np.ones_like(kinds.paused)
    # a plain step, one that only reads, and this one
    ks, paused = np.concatenate([nothing, nothing, kinds.k]), np.concatenate([always, kinds.paused, kinds.paused])
    three = Kinds.of(np.tile(kinds.batch, 3), ks, paused, np.tile(kinds.context, 3))
    plain, reading, drafted = cost.seconds_of(three).reshape(3, -1)
    passes = reading if at_most else plain + np.maximum(1.0, kinds.k) * (reading - plain)
    return plain, drafted - (1.0 - share) * np.maximum(0.0, drafted - passes)


def _tokens_made(
    stats: RolloutStats,
    bands: NDArray[np.int64],
    ks: Numbers,
    drafted: Numbers,
    acceptance: Sequence[float],
    at_most: bool,
) -> Numbers:
    """Tokens of a request with a draft in one step of each kind, [n]: what the rollout has shown of such steps.

    What a band of batch sizes has shown, and not the rollout's mean: the last requests of a rollout are others than the first,
    and text that repeats itself is both long and easy to draft. ``at_most``: or that mean, where it is more, and with the tokens
    for which responses had no room: the one that the rollout waits for has ended once only. Among several k they are shared
    out as is expected.

    Args:
        stats: of the rollout.
        bands: of the kinds, [n].
        ks: of the kinds, [n].
        drafted: forwards of single requests with a draft, of all steps of each kind, [n].
        acceptance: as for ``times_as_long``.
        at_most: see above.
    """
    gained = (stats.tokens_per_forward or 1.0) - 1.0
    cut = stats.accepted_tokens / (gained * stats.forwards) if at_most and gained > 0.0 else 1.0
    gains = np.array([tokens_per_step(acceptance, k) - 1.0 for k in range(int(ks.max(initial=0)) + 1)])[ks.astype(int)]
    whole = 1.0 + np.where(ks > 0, _shared(cut * gained, gains, drafted.sum(), (drafted * gains).sum()), 0.0)
    if not stats.kept_by_batch:
        return whole
    names, of = np.unique(bands, return_inverse=True)
    kept = dict(stats.kept_by_batch)
    forwards, expected = (np.bincount(of, counts, len(names)) for counts in (drafted, drafted * gains))
    shown = np.array([cut * kept.get(band, 0) for band in names.tolist()]) / np.maximum(forwards, 1.0)
    found = 1.0 + np.where(ks > 0, _shared(shown[of], gains, forwards[of], expected[of]), 0.0)
    found = np.where(forwards[of] > 0.0, found, whole)
    return np.maximum(found, whole) if at_most else found


def _shared(found: Any, gains: Numbers, forwards: Any, expected: Any) -> Numbers:
    """What a forward of each kind has gained, of ``found`` in the mean of so many, of which ``expected`` was expected in all."""
    scale = found * forwards / np.where(expected > 0.0, expected, 1.0)
    shared: Numbers = np.where(expected > 0.0, scale * gains, found)
    return shared
