"""How long a rollout would have taken without drafts, from its own steps: what is to be expected of it, and at most."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from spec_plugin.events import RolloutStats
from spec_plugin.step_cost.chances import tokens_per_step
from spec_plugin.step_cost.model import StepCost

#: rollouts that are remembered of a run's own load
_ROLLOUTS = 16


class _Steps(NamedTuple):
    """Steps of one kind, alike (``StepTiming``) or not (``MixedSteps``)."""

    seconds: float  # of all of them
    steps: int
    tokens: float  # of a request with a draft, in each
    share: float  # of their requests that had one
    prompts: bool
    plain: float  # seconds of a plain step in the place of one of them, by the cost model
    own: float  # of one of them, by the cost model, were no prompts read

    @property
    def stands_for(self) -> float:
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
        slow = _slow(list(_all(stats, cost, acceptance)))
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
    found = list(_all(stats, cost, acceptance))
    slow = _slow(found) or 1.0
    took = without = 0.0
    for s in found:
        took += s.seconds
        decoding = min(s.seconds, s.steps * s.own * slow) if s.prompts else s.seconds
        ratio = (s.stands_for * s.plain / s.own + own_load - 1.0) / own_load
        without += decoding * ratio + (s.seconds - decoding)
    return without / took if took > 0.0 else None


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
    found = list(_all(stats, cost, acceptance, at_most=True))
    slow = max(1.0, _slow(found) or float("inf"))
    took = without = 0.0
    for s in found:
        plain = min(s.seconds, s.steps * s.plain * slow) if s.share else s.seconds
        took += s.seconds
        without += (s.seconds if s.prompts else plain) + plain * (s.tokens - 1.0)
    return without / took if took > 0.0 else None


def _slow(found: Sequence[_Steps]) -> float | None:
    """By what factor steps without prompts took longer than the cost model says; None: there were none."""
    decoding = [s for s in found if not s.prompts]
    own = sum(s.steps * s.own for s in decoding)
    return sum(s.seconds for s in decoding) / own if own > 0.0 else None


def _all(stats: RolloutStats, cost: StepCost, acceptance: Sequence[float], at_most: bool = False) -> Iterator[_Steps]:
    made = _tokens_made(stats, acceptance, at_most)

    def seconds(batch: int, k: int, paused: bool, context: float, share: float) -> tuple[float, float]:
        """Of a plain step, and of such a one: what is verified is of those requests that have a draft, its passes are for all."""
        held = context if context >= 1.0 else None
        plain = cost.seconds(batch, 0, context=held)
        reading, drafted = (cost.seconds(batch, n, paused, held) for n in (0, k))
        passes = reading if at_most else plain + max(1, k) * (reading - plain)
        return plain, drafted - (1.0 - share) * max(0.0, drafted - passes)

    for s in stats.steps:
        share = float(s.k > 0)
        times = seconds(s.batch, s.k, s.paused and not s.k, s.context, share)
        yield _Steps(s.seconds * s.steps, s.steps, made(s.batch, s.k), share, False, *times)
    for m in stats.mixed:
        share = min(1.0, m.drafted / (m.batch * m.steps))
        times = seconds(m.batch, m.k, False, m.context, share)
        yield _Steps(m.seconds, m.steps, made(m.batch, m.k) if share else 1.0, share, m.prompts, *times)


def _tokens_made(stats: RolloutStats, acceptance: Sequence[float], at_most: bool) -> Callable[[int, int], float]:
    """Tokens of a request with a draft in one step, by requests of the step and k: what the rollout has shown of such steps.

    What a batch size has shown, and not the rollout's mean: the last requests of a rollout are others than the first, and text
    that repeats itself is both long and easy to draft. ``at_most``: or that mean, where it is more, and with the tokens for which
    responses had no room: the one that the rollout waits for has ended once only.
    """
    gained = (stats.tokens_per_forward or 1.0) - 1.0
    cut = stats.accepted_tokens / (gained * stats.forwards) if at_most and gained > 0.0 else 1.0
    whole = _Shown(acceptance, stats.drafted_by_k, cut * gained)
    kinds: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for s in stats.steps:
        kinds[s.batch] += [(s.k, s.batch * s.steps)] * (s.k > 0)
    for m in stats.mixed:
        kinds[m.batch] += [(m.k, m.drafted)] * (m.drafted > 0)
    kept = dict(stats.kept_by_batch)
    shown = {
        batch: _Shown(acceptance, found, cut * kept.get(batch, 0) / sum(count for _, count in found))
        for batch, found in kinds.items()
        if found and kept
    }

    def made(batch: int, k: int) -> float:
        found = shown.get(batch, whole).tokens(k)
        return max(found, whole.tokens(k)) if at_most else found

    return made


class _Shown:
    """What forwards with a draft have made, among several k as is expected."""

    def __init__(self, acceptance: Sequence[float], by_k: Sequence[tuple[int, int]], found: float) -> None:
        """``by_k``: k and forwards; ``found``: drafted tokens that each forward has added to a response."""
        self._acceptance, self._found = acceptance, found
        expected = sum(count * (tokens_per_step(acceptance, k) - 1.0) for k, count in by_k)
        self._scale = found * sum(count for _, count in by_k) / expected if expected > 0.0 else None

    def tokens(self, k: int) -> float:
        """Of one forward, bonus token included."""
        if not k:
            return 1.0
        gained = self._found if self._scale is None else self._scale * (tokens_per_step(self._acceptance, k) - 1.0)
        return 1.0 + gained
