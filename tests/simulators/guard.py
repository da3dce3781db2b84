"""Runs of a trainer under the provenance guard.

Truth. Log-probs of engine and actor differ by rounding: heavy-tailed (Student's t, 3 degrees of freedom), on a scale of each
sequence's own, of a run's own, which drifts from phase to phase, and is larger by an honest factor where text was drafted for
(verifying steps have other shapes than plain ones). A fifth of the phases is plain, as the controller decides. In every phase
with drafts some requests are the control group's, with a stretch of 64 plain tokens. Where text is a policy version old the
policy has moved, by so much in each step as learning rate and batch say (lognormal over steps, and over sequences). Towards
the end of a long text differences are larger. A fault begins at some phase and stays: what it does is done to drafted text only,
unless said otherwise. ``AT_SCALE`` has what one of 64 ranks trains on: 256 sequences of up to 16k tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import LogprobProvenanceError
from spec_plugin.api.events import Drafts, LogprobBatch, TargetInfo
from spec_plugin.engine.control_group import ControlGroup
from spec_plugin.policy.provenance import ProvenanceGuard
from spec_plugin.trainer.judged import share_for

#: mean |difference| in nats of honest plain text
ROUNDING = {"float32": 2e-6, "bfloat16": 0.016}
#: log-scale of sequences, of the drift from one phase to the next, and the honest factors of drafted text
_SEQUENCES, _DRIFT, _DRAFTED = 0.5, 0.03, (1.0, 1.5)
_PLAIN_EVERY = 5
#: by which the policy moves in a step: median in nats, log-scale over steps
_MOVE, _STEPS = 0.03, 0.8
#: tokens behind which honest differences are larger by a half
_FAR = 16_384


@dataclass(frozen=True)
class Texts:
    """The responses of a phase."""

    lengths: Tensor  # [B]
    place: Tensor  # [B, T] of each token: which one it is
    mask: Tensor  # [B, T] bool

    @classmethod
    def of(cls, lengths: Tensor) -> Texts:
        """Of so many tokens, [B]."""
        place = torch.arange(int(lengths.max()), dtype=torch.float32).expand(len(lengths), -1)
        return cls(lengths, place, place < lengths[:, None])


Fault = Callable[[Tensor, Texts, torch.Generator], Tensor]


@dataclass(frozen=True)
class Setting:
    """A kind of run."""

    name: str
    dtype: str = "bfloat16"
    sequences: int = 64  # of a phase
    judged: int = 64  # of them that are judged together: the trainer's micro-batch, or mini-batch
    tokens: int = 192  # of each response; the median, where they differ
    spread: float = 0.0  # log-scale of their lengths
    most: int | None = None  # tokens where all are cut
    lag: int = 0  # policy versions between sampling and recomputation
    mixed: bool = False  # only a half of the sequences is that old, the others are new
    drift: float = _DRIFT
    #: of ``make guards``, at most: a phase of a million tokens takes long here, too
    runs: int | None = None
    phases: int | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of one run."""

    alarms: int  # phases without drafts that the guard warned of before anything was wrong
    stopped_in: int | None  # the phase
    fault_at: int | None

    @property
    def false_stop(self) -> bool:
        """Was a correct run stopped."""
        return self.stopped_in is not None and (self.fault_at is None or self.stopped_in < self.fault_at)

    @property
    def noticed_after(self) -> int | None:
        """Phases of wrong text that the loss got before; None: never noticed."""
        if self.false_stop or self.stopped_in is None or self.fault_at is None:
            return None
        return self.stopped_in - self.fault_at


@dataclass(frozen=True)
class Off:
    """A share of the tokens is so many nats off, as by another model."""

    nats: float
    share: float = 1.0

    def __call__(self, difference: Tensor, texts: Texts, generator: torch.Generator) -> Tensor:
        """What becomes of honest differences, [B, T]."""
        return difference + self.nats * (torch.rand(difference.shape, generator=generator) < self.share)


@dataclass(frozen=True)
class Noisier:
    """Differences are so many times as large."""

    times: float

    def __call__(self, difference: Tensor, texts: Texts, generator: torch.Generator) -> Tensor:
        """What becomes of honest differences, [B, T]."""
        return difference * self.times


@dataclass(frozen=True)
class Late:
    """All is right but the last two fifths of the responses that are no shorter than their mean."""

    fault: Fault

    def __call__(self, difference: Tensor, texts: Texts, generator: torch.Generator) -> Tensor:
        """What becomes of honest differences, [B, T]."""
        long = texts.lengths >= texts.lengths.double().mean()
        late = long[:, None] & (texts.place >= 0.6 * texts.lengths[:, None])
        return self.fault(difference, texts, generator).where(late, difference)


def heavy(generator: torch.Generator, sequences: int, tokens: int) -> Tensor:
    """[sequences, tokens] with a mean of the absolute of about 1."""
    return heavy_of(generator, torch.full((sequences,), tokens)).view(sequences, tokens)


def heavy_of(generator: torch.Generator, lengths: Tensor) -> Tensor:
    """The same of responses of so many tokens, [B], one after the other: [sum of the lengths]."""
    tokens = int(lengths.sum())
    normal, chi = (torch.randn(*shape, tokens, generator=generator) for shape in ((), (3,)))
    scale = (_SEQUENCES * torch.randn(len(lengths), generator=generator)).exp()
    return normal / chi.pow(2).mean(0).sqrt() * scale.repeat_interleave(lengths) / 1.25


class _Run:
    """One run of the trainer."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting, self.generator = setting, torch.Generator().manual_seed(seed)
        self.guard = ProvenanceGuard()
        target = TargetInfo("", {}, setting.dtype, actor_dtype=setting.dtype)
        self.config = SpecConfig()
        self.guard.spec_configure(config=self.config, target=target)
        self.scale = ROUNDING[setting.dtype] * math.exp(0.5 * self._normal())
        self.drafted = _DRAFTED[0] + (_DRAFTED[1] - _DRAFTED[0]) * float(torch.rand((), generator=self.generator))
        self.group = ControlGroup(self.config.control_share, self.config.k, seed)
        if setting.lag:
            self.group.first, self.group.share = False, share_for(self.config.control_share, setting.judged)
        self.group.ended(setting.tokens)

    def _normal(self) -> float:
        return float(torch.randn((), generator=self.generator))

    def phase(self, version: int, fault: Fault | None, everywhere: bool) -> None:
        """Sample, recompute, check.

        Raises:
            LogprobProvenanceError: if the guard refuses.
        """
        s = self.setting
        speculating = version % _PLAIN_EVERY != 0
        self.scale *= math.exp(s.drift * self._normal())
        texts = self._texts()
        plain = self._control(speculating, texts)
        difference = self._heavy(texts).mul_(self.scale).mul_(1.0 + texts.place / (2 * _FAR))
        difference = difference.where(plain, difference * self.drafted)
        old = torch.zeros(s.sequences, 1, dtype=torch.bool)
        if s.lag:
            old |= (torch.arange(s.sequences)[:, None] % 2 == 0) if s.mixed else True
            moved = s.lag * _MOVE * math.exp(_STEPS * self._normal())
            difference += self._heavy(texts).mul_(moved).mul_(old)
        if fault is not None:
            wrong = fault(difference, texts, self.generator)
            difference = wrong if everywhere else difference.where(plain, wrong)
        self._check(version, difference, torch.where(plain, Drafts.CONTROL, Drafts.ON) * speculating, old, texts.mask)

    def _check(self, version: int, difference: Tensor, drafts: Tensor, old: Tensor, mask: Tensor) -> None:
        s = self.setting
        versions = (version - s.lag * old.long()).expand(-1, mask.shape[1])
        for rows in torch.arange(s.sequences).split(s.judged):
            recomputed = torch.full((len(rows), mask.shape[1]), -500.0, dtype=torch.float64)
            self.guard.spec_check_logprobs(
                batch=LogprobBatch(
                    policy_version=version,
                    recomputed=recomputed,
                    rollout=recomputed + difference[rows],
                    mask=mask[rows],
                    versions=versions[rows],
                    drafted=drafts[rows],
                    rollout_in_loss=False,
                    lag_allowed=bool(s.lag),
                )
            )

    def _texts(self) -> Texts:
        s = self.setting
        if not s.spread:
            return Texts.of(torch.full((s.sequences,), s.tokens))
        lengths = s.tokens * (s.spread * torch.randn(s.sequences, generator=self.generator)).exp()
        return Texts.of(lengths.clamp(1, s.most).long())

    def _heavy(self, texts: Texts) -> Tensor:
        """``heavy`` where there is text, [B, T]."""
        return torch.zeros(texts.mask.shape).masked_scatter_(texts.mask, heavy_of(self.generator, texts.lengths))

    def _control(self, speculating: bool, texts: Texts) -> Tensor:
        """[B, T] which tokens are plain: those of the control group, as the engine draws it."""
        plain = torch.full(texts.mask.shape, not speculating)
        if not speculating:
            return plain
        self.group.begin()
        for row, length in enumerate(texts.lengths.tolist()):
            if stretch := self.group.draw():
                begin, end = stretch.span(0, length)
                plain[row, begin:end] = True
        if self.setting.spread:
            for length in texts.lengths.tolist():
                self.group.ended(length)
        return plain


def run(setting: Setting, seed: int, phases: int, fault: Fault | None = None, everywhere: bool = False) -> Outcome:
    """One run.

    Args:
        setting: its kind.
        seed: of everything random in it.
        phases: rollout phases; the first one is plain. A fault begins anywhere in the first half of them, in the first three
            never.
        fault: None: a correct run.
        everywhere: is plain text as wrong, too.
    """
    one = _Run(setting, seed)
    at = None if fault is None else 3 + int(torch.randint(max(1, phases // 2 - 3), (), generator=one.generator))
    if at is not None and at % _PLAIN_EVERY == 0:
        at += 1  # a phase that drafts
    alarms, stopped = 0, None
    for version in range(phases):
        wrong = fault if at is not None and version >= at else None
        try:
            one.phase(version, wrong, everywhere)
        except LogprobProvenanceError:
            stopped = version
            break
        if wrong is None:
            alarms = int(one.guard.spec_metrics().get("spec/logprob_alarms", 0))
    return Outcome(alarms, stopped, at)


SETTINGS: Sequence[Setting] = (
    Setting("bfloat16, 64 sequences"),
    Setting("bfloat16, micro-batches of 8", judged=8),
    Setting("bfloat16, 16 short ones", sequences=16, judged=16, tokens=48),
    Setting("float32, 64 sequences", dtype="float32"),
    Setting("bfloat16, lag 1, mini-batches of 16", judged=16, lag=1),
    Setting("bfloat16, lag 1 for a half", judged=32, lag=1, mixed=True),
)
_LONG = Setting("", sequences=256, tokens=2600, spread=1.0, most=16_384, judged=256, runs=3, phases=10)
#: what rank 0 of 64 trains on in a step of 16 engines with 1024 requests each
AT_SCALE: Sequence[Setting] = (
    replace(_LONG, name="bfloat16, 256 responses of up to 16k"),
    replace(
        _LONG,
        name="bfloat16, 64 responses of 16k, micro-batches of 8",
        sequences=64,
        tokens=16_384,
        spread=0.0,
        judged=8,
    ),
    replace(_LONG, name="bfloat16, lag 1, 256 of 4k, mini-batches of 64", tokens=4096, spread=0.0, judged=64, lag=1),
)
#: name, and what it does
FAULTS: Sequence[tuple[str, Fault]] = (
    ("0.1 nats a token", Off(0.1)),
    ("0.4 nats a token", Off(0.4)),
    ("0.8 nats a token", Off(0.8)),
    ("8 nats, 1 token of 100", Off(8.0, 0.01)),
    ("noise six times as large", Noisier(6.0)),
)
#: the same of long texts alone
LATE: Sequence[tuple[str, Fault]] = (
    ("0.4 nats a token", Late(Off(0.4))),
    ("0.8 nats a token", Late(Off(0.8))),
)
