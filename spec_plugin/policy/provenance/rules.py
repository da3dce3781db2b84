"""The one table of the provenance guard: which text is held against what, by which test, and from where on it is refused.

``Reference`` reads it, docs/guards.md shows it. Nats are those of temperature 1: log-probs are of logits divided by the
temperature, and so are the nats of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from spec_plugin.api.events import TargetInfo

#: of the differences in a window of text
Statistic = Literal["mean", "largest"]
STATISTICS: tuple[Statistic, ...] = ("mean", "largest")
PerStatistic = Mapping[Statistic, float]
DTYPES = ("float32", "float16", "bfloat16")  # the finest first

#: chance that a batch of a correct run is refused, for each of the two statistics
ERROR_LEVEL = 1e-7
#: chance that a correct phase without drafts is left out of the reference: it must not be spoilt, and leaving out costs nothing
DOUBT_LEVEL = 1e-3
#: share of windows up to which a few of them may be as odd as they like
QUANTILE = 0.9
#: windows below which there is no evidence: of plain text, and of drafted text (they wait for those of the next batch)
ENOUGH = 16
#: phases with plain text that a reference reaches back
PHASES = 16
#: windows of the control group from which on it has a say, and policy versions that they may be old
CONTROL, CONTROL_AGE = 4, 16
#: windows of one step that say how far its policy has moved: a measure that fewer sequences give by chance is a third of the
#: truth once in ten thousand batches, and a correct run is stopped then (``make guards``)
MEASURED = 8
#: nats; a step whose median is no larger has moved nothing
SMALLEST = 1e-12
#: Nats a window, in float32, that no rounding of float32 explains (1e-4 was the most in real runs), and weights that were rounded
#: to bfloat16 do (2e-3 to 2e-2 of small models, for honest 2e-7 to 2e-6)
COARSE_FLOAT32 = 3e-4


def _each(mean: float, largest: float) -> PerStatistic:
    return {"mean": mean, "largest": largest}


@dataclass(frozen=True)
class Precision:
    """What rounding can do to the log-probs of a run."""

    dtype: str  # the coarser of the engine's and the actor's
    scale: float  # 1 / temperature

    @classmethod
    def of(cls, target: TargetInfo) -> Precision:
        """Of a run: its dtypes and its sampling temperature (0 counts as 1)."""
        temperature = float(target.sampling.get("temperature", 1.0)) or 1.0
        return cls(max(target.dtype, target.actor_dtype, key=DTYPES.index), 1.0 / temperature)


@dataclass(frozen=True)
class Floor:
    """Differences that are not held against a run, whatever its plain text shows."""

    name: str
    meaning: str
    nats: Mapping[str, PerStatistic]  # by ``Precision.dtype``
    per_version: bool = False  # times the policy versions between sampling and recomputation

    def of(self, statistic: Statistic, precision: Precision, lag: int) -> float:
        """The floor in nats at this run's temperature, and ``lag`` versions if it grows with them."""
        return self.nats[precision.dtype][statistic] * ((lag if self.per_version else 1) * precision.scale)


# Measured on real runs: float32 means of 5e-7 to 1e-4 (the largest token 20 times as far off), bfloat16 means of 5e-3 to 2e-2 and
# single tokens beyond 1; published bfloat16 means up to 4e-2.
ROUNDING_FLOOR = Floor(
    "rounding_floor",
    "never more than rounding",
    {"float32": _each(1e-5, 3e-4), "float16": _each(5e-4, 1e-2), "bfloat16": _each(3e-3, 0.1)},
)
MAX_PLAUSIBLE = Floor(
    "max_plausible",
    "no correct run shows more in most of its windows",
    {"float32": _each(2e-3, 0.05), "float16": _each(3e-2, 1.0), "bfloat16": _each(0.1, 3.0)},
)
# Measured: one update moves the policy by 5e-4 nats in a quiet run, by 0.1 in one whose first steps were large (float32 both).
MOVE_FLOOR = Floor("move_floor", "so far any update may move the policy", dict.fromkeys(DTYPES, _each(0.2, 6.0)), True)
MAX_MOVE = Floor(
    "max_move", "no update that learns something moves it further", dict.fromkeys(DTYPES, _each(1.0, 30.0)), True
)

#: of plain text: honest differences between the kernels of plain and of verifying steps
DRAFTED_FACTOR = _each(3.0, 10.0)
#: of plain text: beyond it a change from one phase to the next is no drift
JUMP_FACTOR = _each(10.0, 30.0)


@dataclass(frozen=True)
class ToleranceRule:
    """One row: text is refused where too many of its windows are beyond ``floor``, and beyond ``factor`` times plain windows."""

    situation: str
    plain: str  # windows
    factor: PerStatistic | None  # None: ``floor`` alone decides
    floor: Floor


_LAST = f"the last {PHASES} phases"
FIRST_TEXT = ToleranceRule("lag 0, too little plain text known", "none", None, MAX_PLAUSIBLE)
DRIFTED = ToleranceRule("lag 0, the control group is as far off", _LAST, JUMP_FACTOR, ROUNDING_FLOOR)
SAME_POLICY = ToleranceRule("lag 0", _LAST, DRAFTED_FACTOR, ROUNDING_FLOOR)
FIRST_STEP = ToleranceRule("lag >= 1, one of the first measured steps", "the same step", DRAFTED_FACTOR, ROUNDING_FLOOR)
MEASURED_STEP = ToleranceRule(
    "lag >= 1, measured step", "earlier measured steps, scaled to its median", DRAFTED_FACTOR, ROUNDING_FLOOR
)
FIRST_LAG = ToleranceRule(
    "lag >= 1, too little plain text known, or one of the first measured steps", "none", None, MAX_MOVE
)
OTHER_STEPS = ToleranceRule("lag >= 1, no measured step", f"{_LAST}, at this lag", JUMP_FACTOR, MOVE_FLOOR)
RULES = (FIRST_TEXT, DRIFTED, SAME_POLICY, FIRST_STEP, MEASURED_STEP, FIRST_LAG, OTHER_STEPS)

#: One sequence of so many tokens is refused where its mean is beyond all of these: times the mean of ``MAX_PLAUSIBLE``, times the
#: largest plain window (with a lag: and the median sequence of the batch), and nats for each version of lag.
SEQUENCE_TOKENS, SEQUENCE_PLAUSIBLE, SEQUENCE_FACTOR, SEQUENCE_MOVE = 32, 15.0, 30.0, 3.0

#: Rows of a batch, see ``rows``: so many are needed; differences are cut off at so many times the median row's mean; a row is far
#: off where its drift or tilt is beyond so many times the median row's (0.67 where rounding has no direction) and beyond chance.
ROWS, ROWS_CUT, ROWS_FACTOR, ROWS_COIN = 8, 3.0, 6.0, 5.0
#: Share of a correct run's drafted rows that are: so many times that of its plain rows (to which one far off, and so many rows,
#: are added), but never less; plain rows without which nothing is bet; and the share of the capital that is.
ROWS_TIMES, ROWS_PRIOR, ROWS_CHANCE, ROWS_KNOWN, ROWS_BET = 3.0, 250.0, 2e-3, 64, 0.75
