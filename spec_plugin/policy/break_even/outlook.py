"""May a draft still come to pay: by what it has shown, how that has grown, and what one that is always right would make."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise

from spec_plugin.policy.break_even.states import REST
from spec_plugin.step_cost.chances import tokens_per_step

#: measurements of a draft before its growth says anything, and rollouts in a row in which not even a perfect one would have paid
_LEAST, _IN_A_ROW = 8, 3
#: measurements that are kept, the latest: a run has no end, and a step's bookkeeping has
_KEPT = 1024
#: text that a draft is hoped to learn from, in texts that it has learnt from
_TEXTS = 4.0
#: standard errors by which its present worth may be too small
_DOUBT = 2.0
#: rollouts until a look at a draft that has no outlook: the first time, and at most, doubling in between
_FIRST_LOOK, _LAST_LOOK = REST, 4 * REST

Pays = Callable[[Sequence[float]], bool]


class Outlook:
    """Whether draft work rests: harvest, training and refreshes are of no use where no draft can come to pay.

    That is where not even a draft that is always right would pay at the batch sizes that run; or where this one was tried, does
    not pay, and would not if it went on to learn as it has, in a straight line, from ``_TEXTS`` times the text. A line is too
    hopeful of most learning curves, so a draft that learns slowly is not given up early. While work rests each rollout is looked
    at, since the batch sizes may change; and after 7, 14, 28, 28, … rollouts there is one step of all draft work, since the
    policy may have changed.
    """

    def __init__(self, k: int) -> None:
        self._k = k  # most tokens drafted
        self._gains: list[float] = []  # tokens a step beyond the first one, at each measurement
        self._hopeless = 0  # rollouts in a row in which a perfect draft would not have paid
        self._rested, self._look = 0, _FIRST_LOOK
        self.rests = False  # from here on, until it is asked again
        self.resting = False  # the same, and through the looks

    def measured(self, curve: Sequence[float]) -> None:
        """The draft was measured anew, by training or by the engine: the chance of each drafted position."""
        gain = tokens_per_step(curve, self._k) - 1.0
        if not self._gains or gain != self._gains[-1]:  # else nobody has measured
            self._gains.append(gain)
            del self._gains[:-_KEPT]

    def rolled_out(self, curve: Sequence[float] | None, pays: Pays, tried: bool) -> None:
        """A rollout without drafts is over, or one that has dropped them.

        Args:
            curve: the chances that are known now; None: of no draft.
            pays: would a draft of these chances, at the batch sizes that have just run.
            tried: has the engine itself ever measured one.
        """
        self._hopeless = 0 if pays((1.0,) * self._k) else self._hopeless + 1
        hopeful = self._hopeless == 0 and (curve is None or not tried or pays(self.hoped(curve)))
        if hopeful or (self._hopeless and self._hopeless < _IN_A_ROW and not self.rests):
            self.served()
            return
        self.resting = True
        self._rested = self._rested + 1 if self.rests else 0
        self.rests = self._rested < self._look
        if not self.rests:  # one step of all draft work
            self._look = min(_LAST_LOOK, 2 * self._look)

    def served(self) -> None:
        """Drafts pay, or may."""
        self.rests = self.resting = False
        self._rested, self._look = 0, _FIRST_LOOK

    def why(self, makes: float) -> str:
        """It rests, for a person: told what the draft makes now, in tokens a step."""
        if self._hopeless:
            always = f"a draft that is always right ({self._k + 1} tokens a step)"
            return f"rest: not even {always} would be faster at these batch sizes"
        return (
            f"rest: it makes {makes:.2f} tokens a step, by {_TEXTS:g} times the text it may make {1.0 + self.hoped_gain:.2f}, "
            f"and at these batch sizes that is too few to be faster; looked at again in {_FIRST_LOOK} rollouts, then less often"
        )

    def hoped(self, curve: Sequence[float]) -> tuple[float, ...]:
        """What these chances may become, never less than they are; all 1 where too little is known to say.

        Every chance of a miss is smaller by the same factor; a position of which nothing is promised stays so.
        """
        wanted = 1.0 + self.hoped_gain
        if math.isinf(wanted):
            return (1.0,) * self._k
        low, high = 0.0, 1.0
        for _ in range(30):
            middle = (low + high) / 2.0
            low, high = (middle, high) if tokens_per_step(_raised(curve, middle), self._k) < wanted else (low, middle)
        return _raised(curve, high)

    @property
    def hoped_gain(self) -> float:
        """Tokens a step beyond the first one, from ``_TEXTS`` times the text: infinite where that cannot be said yet."""
        n = len(self._gains)
        if n < _LEAST:
            return math.inf
        early, late = self._gains[n // 4 : n // 2], self._gains[n // 2 :]
        now = statistics.fmean(late)
        a_text = (now - statistics.fmean(early)) / (0.75 - 0.375)  # growth over as much text as there was
        steps = [b - a for a, b in pairwise(late)]
        noise = math.sqrt(statistics.fmean(s * s for s in steps) / 2.0 / len(late)) if steps else 0.0
        return now + _DOUBT * noise + (_TEXTS - 0.75) * max(0.0, a_text)


def _raised(curve: Sequence[float], by: float) -> tuple[float, ...]:
    return tuple(1.0 - (1.0 - chance) * (1.0 - by) if chance > 0.0 else 0.0 for chance in curve)
