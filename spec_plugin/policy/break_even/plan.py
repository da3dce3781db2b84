"""Which k for which batch size: pure functions from the cost model, the acceptance and the load to a table (law 7)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from spec_plugin.api.events import RolloutStats
from spec_plugin.api.speculation import Reason
from spec_plugin.step_cost.chances import tokens_per_step
from spec_plugin.step_cost.model import StepCost

#: what is not in force now must be better by this factor, drafts than none and one k than another: no flapping on noise
MARGIN = 1.05
#: batch sizes that stand for those of a band
_LOOKED_AT = 4


@dataclass(frozen=True)
class Plan:
    """A table of k, and what it is expected to do to the phase."""

    table: tuple[int, ...]  # k for batch sizes 0..max_num_seqs
    speedup: float  # predicted decoding time of a plain phase / of this one
    reason: Reason = Reason.PREDICTED_TO_PAY

    @property
    def speculates(self) -> bool:
        """True if k is above 0 at any batch size."""
        return any(self.table)


def no_drafts(size: int, reason: Reason = Reason.BELOW_BREAK_EVEN) -> Plan:
    """k = 0 at every batch size up to ``size``, and why."""
    return Plan((0,) * (size + 1), 1.0, reason)


def fixed(k: int, size: int, reason: Reason = Reason.PREDICTED_TO_PAY) -> Plan:
    """The same k at every batch size up to ``size``, and why; predicts no speed-up."""
    return Plan((0,) + (k,) * size, 1.0, reason)


def best(
    cost: StepCost, acceptance: Sequence[float], load: Mapping[float, float], current: Sequence[int], ks: Sequence[int]
) -> Plan:
    """The table with the most tokens per second, or plain decoding where the whole phase would gain nothing.

    Each band of batch sizes gets its own best k. Where that is 0 the draft still runs its first forward pass (vLLM keeps its
    KV cache current so), unless no batch size drafts at all: therefore the phase as a whole is compared with a paused draft,
    over the batch sizes that the last phase went through.

    Args:
        cost: seconds of a step.
        acceptance: chance of each position, see ``cost.tokens_per_step``.
        load: batch size -> tokens that a phase generates at that size.
        current: the table in force, of length max_num_seqs + 1.
        ks: what can be drafted, 0 among it.
    """
    size, serving = len(current) - 1, any(current)
    table = fastest(cost, acceptance, size, ks, current)
    if not any(table):
        return no_drafts(size)
    speedup = phase_speedup(cost, acceptance, load, table)
    return Plan(table, speedup) if speedup > (1.0 if serving else MARGIN) else no_drafts(size)


def fastest(
    cost: StepCost, acceptance: Sequence[float], size: int, ks: Sequence[int], current: Sequence[int] = ()
) -> tuple[int, ...]:
    """For each batch size up to ``size`` the one of ``ks`` with the most tokens per second; a little more changes nothing.

    The other arguments are those of ``best``; ``current`` may be empty.
    """
    parts = bands(size)
    looked_at = [sorted({int(b) for b in np.linspace(part[0], part[-1], _LOOKED_AT)}) for part in parts]
    batches = np.array([batch for sizes in looked_at for batch in sizes])[:, None]
    each = cost.seconds_of(batches, np.array(ks), False) / batches  # [sizes, ks] seconds of a step for each request
    begins = np.cumsum([0, *(len(sizes) for sizes in looked_at[:-1])])
    rates = np.array([tokens_per_step(acceptance, k) for k in ks]) / np.add.reduceat(each, begins)  # [bands, ks]
    table = [0]
    for part, of_all in zip(parts, rates.tolist(), strict=True):
        now = current[part[-1]] if current else 0
        table += [_best_k(dict(zip(ks, of_all, strict=True)), now, any(current))] * len(part)
    return tuple(table)


def bands(size: int) -> list[range]:
    """Batch sizes that get the same k: 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, …; the noise of single ones is averaged out."""
    edges = sorted({e for i in range(size.bit_length() + 1) for e in (2**i, 3 * 2**i // 2) if e < size} | {size})
    return [range(a + 1, b + 1) for a, b in pairwise([0, *edges])]


def _best_k(rates: Mapping[int, float], current: int, serving: bool) -> int:
    top = max(rates, key=rates.__getitem__)
    return current if serving and rates[top] < MARGIN * rates.get(current, 0.0) else top


def phase_speedup(
    cost: StepCost, acceptance: Sequence[float], load: Mapping[float, float], table: Sequence[int]
) -> float:
    """Predicted decoding time with a paused draft / with this table, for a phase of this load."""
    batches, tokens = (np.array([*column], np.float64) for column in (load.keys(), load.values()))
    ks = [table[min(math.ceil(batch), len(table) - 1)] for batch in load]
    steps, made = tokens / batches, np.array([tokens_per_step(acceptance, k) for k in range(max(table) + 1)])[ks]
    plain = float((steps * cost.seconds_of(batches, 0)).sum())
    drafting = float((steps / made * cost.seconds_of(batches, ks, False)).sum())
    return plain / drafting if drafting > 0 else 1.0


def break_even_of(cost: StepCost, table: Sequence[int]) -> tuple[float, ...]:
    """Tokens of a verification step from which drafting as the table says is faster than k = 0, by batch size.

    Against a step that keeps the draft's KV cache current, not a paused draft: where a batch of this size drafts for the sake
    of a later, smaller one, the phase as a whole has been compared by ``best``.
    """
    batches = np.arange(1, len(table))
    ratios = cost.seconds_of(batches, table[1:], False) / cost.seconds_of(batches, 0, False)
    return (1.0, *np.maximum(1.0, ratios).tolist())


def load_of(stats: RolloutStats, acceptance: Sequence[float]) -> dict[float, float]:
    """Batch size -> tokens that a phase generated at about that size, from its step log."""
    load: dict[float, float] = {}
    made = {k: tokens_per_step(acceptance, k) for k in {s.k for s in stats.steps}}
    for s in stats.steps:
        if not s.prompts:
            load[s.batch] = load.get(s.batch, 0.0) + s.forwards + s.drafted * (made[s.k] - 1.0)
    return load


def slowdown_without(stats: RolloutStats, cost: StepCost, acceptance: Sequence[float]) -> float | None:
    """Seconds that a rollout's steps would have taken without drafts over what they took; None where none was timed.

    A step that made n tokens of each request stands for n plain ones, of the same moment: so what else the machine did cancels.
    One that reads prompts reads them either way: without drafts it is shorter by these, and what they made takes plain steps.

    Args:
        stats: of the rollout.
        cost: seconds of a step, as the pairs have put it right.
        acceptance: chance of each position.
    """
    if not stats.steps:
        return None
    rows = [
        (s.batch, s.k, s.paused, s.total, s.steps, s.drafted, s.drafted / s.forwards, s.prompts) for s in stats.steps
    ]
    batch, k, paused, seconds, steps, drafted, share, prompts = np.array(rows, np.float64).T
    gains = np.array([tokens_per_step(acceptance, int(n)) - 1.0 for n in k])
    expected = float((gains * drafted).sum() / max(1.0, drafted.sum()))
    found = (stats.tokens_per_forward or 1.0) - 1.0  # what is expected says how that divides among several k
    gains = gains * (found / expected) if expected > 0.0 else np.full_like(gains, found)
    plain, here = steps * cost.seconds_of(batch, 0), steps * cost.seconds_of(batch, k, paused > 0.0)
    added = share * gains  # tokens of each request
    without = (1.0 + added) * seconds * plain / here
    # without a draft's tokens nothing is saved, whatever two measurements of busy moments say of the draft's own pass
    without = np.where(share > 0.0, without, np.minimum(seconds, without))
    decodes = prompts == 0.0
    slow = seconds[decodes].sum() / here[decodes].sum() if decodes.any() else 1.0  # at this moment
    reads = np.maximum(slow * plain, seconds - share * slow * (here - plain)) + added * slow * plain
    without = np.where(decodes, without, np.where(share > 0.0, reads, seconds))
    return float(without.sum() / seconds.sum())
