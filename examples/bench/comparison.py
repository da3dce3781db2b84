"""The paper's comparison of drafts, as data: arms, what was replayed and served of them, and what follows from the numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from examples.bench.common import Spread

STARTS = ("newborn", "other", "own")
#: the k at which acceptance lengths are compared, and the margins within which two numbers count as equal: tokens of a replay
#: of 48 rollouts, and a ratio of speeds
AT_K, TIE, SPEED_TIE = 3, 0.05, 0.03


@dataclass(frozen=True)
class Arm:
    """How the draft starts, and whether it trains along the run."""

    start: str  # of STARTS: untrained; before the run, on other text; before the run, on the policy's own rollouts
    online: bool

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.start}, {'online' if self.online else 'frozen'}"


ARMS = tuple(Arm(start, online) for start in STARTS for online in (False, True))


@dataclass(frozen=True)
class Replay:
    """One arm at one trainer step: the draft that was trained on the steps before it, on the rollouts of this one."""

    policy: str
    arm: str
    step: int
    lengths: dict[int, float]  # acceptance length by k
    promised: tuple[float, ...]  # chance of each token on the rollouts of the step before: what a controller is told


@dataclass(frozen=True)
class Served:
    """One arm at one trainer step, in the engine that serves the policy of this step."""

    policy: str
    arm: str
    step: int
    plain: Spread  # tokens/s with k=0
    speed: dict[str, Spread]  # by "k=3" or "controller": against k=0 in the same rounds
    lengths: dict[str, float]  # acceptance length, the same
    chosen: list[str]  # the controller's tables, round by round


def to_serve(step: int, first: int) -> dict[Arm, tuple[Arm, ...]]:
    """What to run in an engine at a step: arm -> all arms that have its draft then.

    Before the first trainer step an online arm is the frozen one. An untrained draft stays what it is: it is served once.

    Args:
        step: of the run.
        first: the first step that is served.
    """
    if step == 0:
        return {arm: (arm, Arm(arm.start, True)) for arm in ARMS if not arm.online}
    return {arm: (arm,) for arm in ARMS if step == first or arm != Arm("newborn", False)}


def conclusions(policy: str, replays: Sequence[Replay], served: Sequence[Served]) -> list[str]:
    """What the numbers of one policy say on the paper's questions, a sentence each, good or bad."""
    table = {(r.arm, r.step): r.lengths[AT_K] for r in replays if r.policy == policy}
    steps = sorted({step for _, step in table})
    mine = [s for s in served if s.policy == policy]
    return [
        *(_ordered(table, steps, better, worse) for better, worse in (("own", "other"), ("other", "newborn"))),
        _online(table, steps),
        *(_decay(table, steps, start) for start in ("own", "other")),
        *_fastest(mine),
        *_deeper(mine),
        *_controller(mine),
    ]


def _ordered(table: dict[tuple[str, int], float], steps: Sequence[int], better: str, worse: str) -> str:
    """Is one start ahead of the other, frozen and online, at all steps."""
    parts = []
    for online in (False, True):
        a, b = Arm(better, online), Arm(worse, online)
        gaps = {step: table[a.name, step] - table[b.name, step] for step in steps}
        ahead, even, behind = (
            [str(step) for step, gap in gaps.items() if low < gap <= high]
            for low, high in ((TIE, math.inf), (-TIE, TIE), (-math.inf, -TIE))
        )
        verdict = "fails" if behind else "holds" if ahead else "no difference"
        told = f"ahead at {len(ahead)} of {len(steps)} steps"
        told += f", even at step {', '.join(even)}" * bool(even) + f", behind at step {', '.join(behind)}" * bool(
            behind
        )
        numbers = "; ".join(f"step {s}: {table[a.name, s]:.2f} against {table[b.name, s]:.2f}" for s in _ends(steps))
        parts.append(f"{'Online' if online else 'Frozen'}: {verdict}, {told} ({numbers})")
    return f"A start on {better} beats {worse} (k={AT_K}). " + ". ".join(parts) + "."


def _online(table: dict[tuple[str, int], float], steps: Sequence[int]) -> str:
    """Where training along the run helps most, at the last step."""
    last = steps[-1]
    gains = {start: table[Arm(start, True).name, last] - table[Arm(start, False).name, last] for start in STARTS}
    ranked = sorted(gains, key=gains.__getitem__, reverse=True)
    text = ", ".join(f"{start} {gains[start]:+.2f}" for start in ranked)
    hurts = [start for start in ranked if gains[start] < -TIE]
    even = [start for start in ranked if abs(gains[start]) <= TIE]
    notes = [f" It hurts {' and '.join(hurts)}."] * bool(hurts) + [f" No change for {' and '.join(even)}."] * bool(even)
    return f"Online training at step {last} adds most to {ranked[0]}: {text} tokens (k={AT_K})." + "".join(notes)


def _decay(table: dict[tuple[str, int], float], steps: Sequence[int], start: str) -> str:
    """Does a frozen draft fall behind a moving policy; beside it the online one, which sees the same rollouts."""
    first, last = steps[0], steps[-1]
    frozen, online = (
        [table[Arm(start, kind).name, first], table[Arm(start, kind).name, last]] for kind in (False, True)
    )
    change = frozen[1] - frozen[0]
    verdict = "decays" if change < -TIE else "does not decay" if change <= TIE else "does not decay but rises"
    numbers = (
        f"{frozen[0]:.2f} at step {first}, {frozen[1]:.2f} at step {last}; online {online[0]:.2f}, {online[1]:.2f}"
    )
    return f"The frozen draft of {start} {verdict}: {numbers} (k={AT_K})."


def _fastest(served: Sequence[Served]) -> Iterator[str]:
    """What an engine gains at each served step, at best and from which draft."""
    for step in sorted({s.step for s in served}):
        fixed = {
            (s.arm, k): speed.median
            for s in _distinct(served)
            if s.step == step
            for k, speed in s.speed.items()
            if k != "controller"
        }
        arm, k = max(fixed, key=fixed.__getitem__)
        gain = (
            f"the fastest is {arm} with {k}: {fixed[arm, k]:.2f}x"
            if fixed[arm, k] > 1
            else "no draft is faster than none"
        )
        yield f"In the engine of step {step} {gain}."


def _deeper(served: Sequence[Served]) -> Iterator[str]:
    """Do more drafted tokens than three lose."""
    for arm in (f"k={k}" for k in (5, 7)):
        ratios = {
            f"{s.arm} at step {s.step}": s.speed[arm].median / s.speed["k=3"].median
            for s in _distinct(served)
            if arm in s.speed and "k=3" in s.speed and not s.arm.startswith("newborn, frozen")
        }
        if not ratios:
            continue
        slower = [name for name, r in ratios.items() if r < 1 - SPEED_TIE]
        faster = [name for name, r in ratios.items() if r > 1 + SPEED_TIE]
        verdict = (
            "loses against k=3 everywhere" if len(slower) == len(ratios) else "does not lose against k=3 everywhere"
        )
        verdict = "wins against k=3 everywhere" if len(faster) == len(ratios) else verdict
        others = f"; faster: {', '.join(faster)}" if faster and slower else ""
        middle = statistics.median(ratios.values())
        yield (
            f"{arm} {verdict}: slower in {len(slower)}, faster in {len(faster)} of {len(ratios)} served drafts, median "
            f"{middle:.2f} of its speed{others}."
        )


def _controller(served: Sequence[Served]) -> Iterator[str]:
    """How far the controller is from the best k in hindsight, and from none."""
    cells = [s for s in _distinct(served) if "controller" in s.speed]
    if not cells:
        return
    regret = {
        f"{s.arm} at step {s.step}": s.speed["controller"].median
        / max(1.0, *(v.median for n, v in s.speed.items() if n != "controller"))
        for s in cells
    }
    plain = {f"{s.arm} at step {s.step}": s.speed["controller"].median for s in cells}
    worst, slowest = min(regret, key=regret.__getitem__), min(plain, key=plain.__getitem__)
    yield (
        f"The controller has {statistics.median(regret.values()):.2f} of the speed of the best k in hindsight (median of "
        f"{len(cells)}), at worst {regret[worst]:.2f} ({worst}); against no drafts at worst {plain[slowest]:.2f} ({slowest})."
    )


def _distinct(served: Sequence[Served]) -> list[Served]:
    """Without the arms that stand for another one's run."""
    return [s for s in served if not (s.step == 0 and s.arm.endswith("online"))]


def _ends(steps: Sequence[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((steps[0], steps[-1])))
