"""Runs in which a few rows of each batch are wrong, batch after batch, under the provenance guard.

Truth. The policy is a random law over ``V`` tokens at each place, the same in all phases of a run (0.5 or 2.8 nats of entropy;
in longer texts than ``TOKENS`` the places come again), from which tokens are sampled; the engine states their log-probs with
the rounding of ``guard``: heavy-tailed, on a scale of each row, run and phase. All phases but every fifth draft, without a
control group. From some phase on ``wrong`` of 64 rows are stated wrongly by the engine itself, so that no sum of its own
tells: only the recomputation does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from simulators.guard import _DRAFTED, _DRIFT, _PLAIN_EVERY, ROUNDING, heavy
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import LogprobProvenanceError
from spec_plugin.api.events import Drafts, LogprobBatch, TargetInfo
from spec_plugin.policy.provenance import ProvenanceGuard
from spec_plugin.policy.provenance.rows import RowEvidence
from spec_plugin.policy.provenance.rules import Precision

ROWS, TOKENS, V = 64, 200, 64
#: of long texts: how many times as long as ``TOKENS``
LONG = 82
#: wrong phases in which a wrong run must be stopped
WITHIN = 10
#: logits' scales with entropies of 0.5 and 2.8 nats
_SCALES = (6.5, 1.8)


@dataclass(frozen=True)
class Stated:
    """What an engine states of a batch, [B, T] each."""

    right: Tensor  # the policy's own, as the engine rounds them
    cooler: Tensor  # the same at temperature 0.7


Fault = Callable[[Stated], Tensor]


#: name, and what wrong rows state
FAULTS: Sequence[tuple[str, Fault]] = (
    ("another row's", lambda s: s.right.roll(1, 0)),
    ("shifted by one", lambda s: s.right.roll(1, 1)),
    ("temperature 0.7", lambda s: s.cooler),
    ("all zero", lambda s: torch.zeros_like(s.right)),
    ("0.05 nats", lambda s: s.right - 0.05),
    ("0.4 nats in the last 40 %", lambda s: s.right - 0.4 * (torch.arange(s.right.shape[1]) >= 0.6 * s.right.shape[1])),
)


class _Run:
    def __init__(self, seed: int, times: int = 1) -> None:
        self.generator, self.times = torch.Generator().manual_seed(seed), times
        self.guard = ProvenanceGuard()
        self.guard.spec_configure(SpecConfig(), TargetInfo("", {}, "bfloat16", actor_dtype="bfloat16"))
        normal, *uniform = torch.randn((), generator=self.generator), *torch.rand(2, generator=self.generator)
        self.scale = ROUNDING["bfloat16"] * math.exp(0.5 * float(normal))
        self.drafted = _DRAFTED[0] + (_DRAFTED[1] - _DRAFTED[0]) * float(uniform[0])
        logits = _SCALES[int(2 * float(uniform[1]))] * torch.randn(ROWS * TOKENS, V, generator=self.generator)
        self.law, self.cooler = logits.log_softmax(-1), (logits / 0.7).log_softmax(-1)

    def phase(self, version: int, wrong: int, fault: Fault | None) -> None:
        """Sample, state, recompute, check.

        Raises:
            LogprobProvenanceError: if the guard refuses.
        """
        g, drafts = self.generator, version % _PLAIN_EVERY != 0
        self.scale *= math.exp(_DRIFT * float(torch.randn((), generator=g)))
        token = torch.multinomial(self.law.exp(), self.times, replacement=self.times > 1, generator=g)
        found = (law.gather(-1, token).view(ROWS, TOKENS, -1) for law in (self.law, self.cooler))
        recomputed, cooler = (log_probs.transpose(1, 2).flatten(1) for log_probs in found)
        rounding = self.scale * (self.drafted if drafts else 1.0) * heavy(g, *recomputed.shape)
        stated = Stated((recomputed + rounding).clamp(max=0.0), (cooler + rounding).clamp(max=0.0))
        rollout = stated.right
        if fault is not None and drafts:
            rows = torch.randperm(ROWS, generator=g)[:wrong]
            rollout = rollout.clone()
            rollout[rows] = fault(stated)[rows]
        self.guard.spec_check_logprobs(
            LogprobBatch(
                policy_version=version,
                recomputed=recomputed.double(),
                rollout=rollout.double(),
                mask=torch.ones_like(recomputed, dtype=torch.bool),
                versions=torch.full(recomputed.shape, version),
                drafted=torch.full(recomputed.shape, Drafts.ON if drafts else Drafts.OFF, dtype=torch.uint8),
                rollout_in_loss=False,
            )
        )


def highest(seed: int, phases: int, spread: float = 0.5, towards: float = 0.0) -> float:
    """The largest capital of the bet on rows in a correct run, one unit a phase being added.

    Args:
        seed: of everything random.
        phases: of the run; every fifth is plain.
        spread: log-scale by which the rounding of rows differs.
        towards: of a row's rounding, the part that is the same for all of its tokens (a normal variable's scale, in units of it).
    """
    one, most = _Run(seed), 0.0
    evidence = RowEvidence(Precision("bfloat16", 1.0))
    g = one.generator
    tokens = torch.multinomial(one.law.exp(), 4, generator=g, replacement=True)
    texts = [one.law.gather(-1, token[:, None]).view(ROWS, TOKENS) for token in tokens.unbind(-1)]
    mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    for version in range(phases):
        scale = one.scale * (spread * torch.randn(ROWS, 1, generator=g)).exp()
        normal, chi = (torch.randn(*shape, ROWS, TOKENS, generator=g) for shape in ((), (3,)))
        lean = towards * torch.randn(ROWS, 1, generator=g)
        recomputed = texts[version % len(texts)]
        stated = (recomputed + scale * (normal / chi.pow(2).mean(0).sqrt() / 1.25 + lean)).clamp(max=0.0)
        if version % _PLAIN_EVERY == 0:
            evidence.learn(recomputed, stated, mask)
        elif evidence.judge(recomputed, stated, mask) is not None:
            return math.inf
        most = max(most, evidence.capital)
    return most


def run(wrong: int, fault: int, seed: int, adds_up: bool = True, times: int = 1) -> int | None:
    """After how many wrong phases that draft is a run stopped; None: not within ``WITHIN``, or before anything was wrong.

    Args:
        wrong: rows of 64.
        fault: its index in ``FAULTS``.
        seed: of everything random.
        adds_up: with the evidence of rows that adds up over phases; False: without it.
        times: how many times as long as ``TOKENS`` each text is.
    """
    one = _Run(seed, times)
    begin = 1 + int(torch.randint(20, (), generator=one.generator))
    drafting = 0
    with patch.object(RowEvidence, "judge", RowEvidence.judge if adds_up else lambda *_: None):
        for version in range(begin + 2 * WITHIN):
            now = FAULTS[fault][1] if version >= begin else None
            drafting += now is not None and version % _PLAIN_EVERY != 0
            if drafting > WITHIN:
                break
            try:
                one.phase(version, wrong, now)
            except LogprobProvenanceError:
                return drafting or None
    return None
