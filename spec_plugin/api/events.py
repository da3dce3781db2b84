"""The frozen dataclasses that hooks carry: the vocabulary of the whole package.

Shapes use these letters: V vocabulary, H hidden size, A number of auxiliary layers, N packed tokens, B sequences,
T response positions, k drafted tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any

from draft_training.outside import is_size, text_part
from draft_training.rope import derived_length

if TYPE_CHECKING:  # `spec-plugin check` answers without torch, whose import alone takes seconds
    from torch import Tensor


#: sampling options by vLLM's names, and values of each that leave the distribution whole; the first is vLLM's default
_WHOLE: Mapping[str, tuple[float, ...]] = {"top_p": (1.0,), "top_k": (-1, 0)}


def truncating(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a rollout's sampling options that cut tokens off the policy's distribution, with their values."""
    return {name: sampling[name] for name, whole in _WHOLE.items() if sampling.get(name, whole[0]) not in whole}


@dataclass(frozen=True)
class TargetInfo:
    """What the plugins may know of the target and of the engine that serves it."""

    path: str  # folder of the target's checkpoint, as the engine sees it
    hf_config: Mapping[str, Any]  # the target's config.json as a plain dict
    dtype: str  # dtype of the rollout engine's weights: "float32", "bfloat16", "float16"
    device_type: str = "cpu"  # "cpu" or "cuda"
    tensor_parallel: int = 1
    max_num_seqs: int = 256
    max_model_len: int | None = None
    load_format: str = "auto"  # how the engine comes by the target's first weights; "dummy": the trainer sends them
    engine_options: Mapping[str, Any] = field(default_factory=dict)  # the trainer's own engine arguments
    sampling: Mapping[str, Any] = field(default_factory=dict)  # the rollout's sampling options
    actor_dtype: str = "float32"  # dtype in which the actor recomputes log-probs
    actor_group: Any = None  # torch.distributed group of the data-parallel actors, None for a single one

    @property
    def file(self) -> str:
        """The file that ``hf_config`` was read from, as messages name it."""
        return f"the config.json of the target {self.path}"

    @property
    def length(self) -> int | None:
        """Tokens of the longest text that the engine serves; None: neither the run nor the target's config.json says."""
        if is_size(self.max_model_len):
            return self.max_model_len
        found = derived_length(self.hf_config)
        return None if found is None else found[1]

    @property
    def vocab_size(self) -> int | None:
        """Of the target; families of several parts name it for that of texts. None: its config.json does not say."""
        parts = (text_part(self.hf_config), self.hf_config)
        return next((part["vocab_size"] for part in parts if isinstance(part.get("vocab_size"), int)), None)

    @property
    def truncated(self) -> bool:
        """Do the rollouts sample from a truncated distribution: then the engine's log-probs are not comparable to the actor's."""
        return bool(truncating(self.sampling))


@dataclass(frozen=True)
class HiddenStates:
    """Hidden states of documents, or of parts of them, from one forward pass of the target, packed one after the other, detached.

    ``aux[t]`` are the residual streams that *enter* the auxiliary layers at token t (vLLM's convention), concatenated
    in ascending layer order; ``last[t]`` is the output of the final norm, so that ``last @ lm_head.T`` are the logits
    for token t + 1.
    """

    input_ids: Tensor  # [N] int64
    aux: Tensor  # [N, A * H]
    last: Tensor  # [N, H]
    loss_mask: Tensor  # [N] bool, True where the token was sampled by the policy (the response)
    lengths: tuple[int, ...]  # tokens of each document, sum == N
    policy_version: int
    milliseconds: float = 0.0  # what this harvest added to the forward pass
    offsets: tuple[int, ...] = ()  # tokens of each document before its first one here; (): none, they are whole
    #: the tensors lie in the host's memory, are finite, and nobody else writes to them: whoever keeps them need not copy
    owned: bool = False


@dataclass(frozen=True)
class WeightSync:
    """Target weights that have just reached the engine."""

    policy_version: int
    embed: Tensor | None  # [V, H] input embedding of the policy, or None when the sync carried no such tensor
    lm_head: Tensor | None  # [V, H] LM head of the policy; equals ``embed`` when the target ties them


@dataclass(frozen=True)
class DraftRefresh:
    """Draft weights to install in the engine at the safe point right after a weight sync."""

    draft_version: int
    policy_version: int
    tensors: Mapping[str, Tensor]  # names of the draft checkpoint; never a tensor that the target owns
    #: over names, dtypes, shapes and bytes: ``draft_training.fingerprint``, or with ``spec.audit`` ``draft_training.digest``
    digest: str
    #: the chance of each drafted token to be accepted, given those before it, that training predicts for these weights, as far
    #: as it unrolls; empty: no prediction
    expected_chances: tuple[float, ...] = ()
    #: at which an engine with ``draft_sample_method=probabilistic`` is to draw proposals, as a factor of the rollouts'
    #: temperature; 0: the draft's likeliest tokens. Another engine proposes these in any case
    draft_temperature: float = 1.0


@dataclass(frozen=True)
class RefreshReport:
    """What became of one refresh, as the engine reports it."""

    installed: bool
    draft_version: int  # the version that the engine serves after this refresh
    digest: str  # digest of the weights that the engine serves
    milliseconds: float
    reason: str = ""  # why it was refused; empty when installed


@dataclass(frozen=True)
class EngineState:
    """What the engine really holds, hashed in its worker; only with ``spec.audit``."""

    moment: str  # "synced", "refreshed", "rollout" (about to begin) or "rolled out"
    policy_version: int  # that the engine knows of
    draft_version: int
    draft_digest: str  # of the draft's own weights; equals ``DraftRefresh.digest`` for an unpruned draft
    target_digest: str  # of the target's weights
    admitted: int = 0  # requests that the engine was free to go on with: none before a phase has begun
    embed_digest: str = (
        ""  # of its embedding and its head, as ``WeightSync`` names them; "" where each rank holds a part
    )
    head_digest: str = ""


@dataclass(frozen=True)
class Schedule:
    """How much to draft in the coming rollout phase."""

    table: tuple[int, ...]  # [max_num_seqs + 1] k for each number of running requests, 0 = plain decoding
    #: [max_num_seqs + 1] tokens per verification step below which drafting is slower than not drafting; a draft that stays
    #: below is dropped there for the rest of the phase. Empty: never.
    break_even: tuple[float, ...] = ()
    #: share of the phase's requests in the control group; None: ``spec.control_share``
    control_share: float | None = None
    #: share of the drafting steps that may be decoded plainly, in short stretches, to be compared with those around them
    plain_share: float = 0.0


@dataclass(frozen=True)
class EngineSchedule:
    """What the engines have confirmed of how much they draft: the one answer to "are we drafting?".

    It does not say what was chosen or sent: an engine may not have heard of that, or have begun the phase without it.
    """

    confirmed: Schedule | None = None  # in force; None: no engine, or not each of them, has said what is

    @property
    def drafting(self) -> bool:
        """Does any batch size draft; yes, as long as it is not known (law 3): an engine starts with drafts."""
        return self.confirmed is None or any(self.confirmed.table)

    @staticmethod
    def of_all(engines: Sequence[EngineSchedule]) -> EngineSchedule:
        """Several engines' as one: that of the engine of which least is known, else of one that drafts, if there is any."""
        return max(engines, key=lambda engine: (engine.confirmed is None, engine.drafting))


@dataclass(frozen=True)
class StepTiming:
    """Steps of the engine of one kind and one band of batch sizes, see ``spec_plugin.step_cost.bands``.

    Of steps that were alike ``seconds``, ``batch`` and ``context`` are means over those in the middle of the seconds, else over
    all.
    """

    batch: float  # requests in such a step
    k: int  # tokens drafted, and verified, of each; where the steps were not alike, the most of one of them
    paused: bool  # with k = 0: was the draft's forward pass left out
    seconds: float  # from the start of one step to the start of the next
    steps: int  # all of them
    context: float = 0.0  # tokens that a request of such a step had in the KV cache; 0: not known
    forwards: int = -1  # requests of all these steps together; where it is not said, ``batch * steps``
    drafted: int = -1  # of these, those that had a draft verified; where it is not said, all if k is above 0
    alike: bool = True  # did all requests decode with the same k before and after
    prompts: bool = False  # did some of them read their prompt

    def __post_init__(self) -> None:
        if self.forwards < 0:
            object.__setattr__(self, "forwards", round(self.batch * self.steps))
        if self.drafted < 0:
            object.__setattr__(self, "drafted", self.forwards * (self.k > 0))

    @property
    def total(self) -> float:
        """Seconds of all these steps together."""
        return self.seconds * self.steps


@dataclass(frozen=True)
class StepPair:
    """A few plain steps in the middle of drafted ones: same engine, same batch, same machine, same second."""

    batch: int  # requests in each of the plain steps, in the mean
    k: int  # drafted in the steps before and after
    drafted_seconds: float  # mean of two medians, of those before and of those after
    plain_seconds: float  # median of the plain ones, in which the draft went on reading the text


@dataclass(frozen=True)
class RolloutStats:
    """What the engine did during one rollout phase; differences of cumulative counters."""

    policy_version: int
    requests: int
    tokens: int
    seconds: float  # first request in, last request out
    drafts: int = 0  # verification steps, i.e. target forwards of speculating requests
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_pos: tuple[int, ...] = ()  # [k]
    steps: tuple[StepTiming, ...] = ()  # of this phase
    #: of a method that can tell: what drafting would have accepted while k was 0
    shadow_rounds: int = 0
    shadow_per_pos: tuple[int, ...] = ()  # [k]
    #: were requests cut short, to go on under the next policy: the trainer is asynchronous
    interrupted: bool = False
    pairs: tuple[StepPair, ...] = ()  # of this phase, in the order of time within each engine
    past_end_per_pos: tuple[int, ...] = ()  # [k]: accepted, but more than the response had room for
    prompt_tokens: int = 0  # read in steps of this phase, without those that the prefix cache had
    #: of these, what the prefix cache had but vLLM dropped for the draft's sake: one block of each request that it knew
    recomputed_tokens: int = 0
    busy_seconds: float = 0.0  # of the slowest engine, in steps of all kinds
    parts: tuple[RolloutStats, ...] = ()  # of several engines, what each of them did

    @property
    def drafted_by_k(self) -> list[tuple[int, int]]:
        """k, and the forwards of single requests with a draft of so many tokens, of each kind of step in the log."""
        return [(s.k, s.drafted) for s in self.steps if s.drafted]

    @property
    def alike(self) -> tuple[StepTiming, ...]:
        """Of ``steps`` those that say what a step of their kind takes."""
        return tuple(s for s in self.steps if s.alike)

    @property
    def forwards(self) -> int:
        """Target forwards of single requests while k was above 0, with a draft or, of a method that often finds none, without."""
        return max(self.drafts, sum(count for _, count in self.drafted_by_k))

    @property
    def tokens_per_forward(self) -> float | None:
        """Mean tokens that ``forwards`` added to responses, bonus token included; None when nothing was drafted."""
        return 1.0 + (self.accepted_tokens - sum(self.past_end_per_pos)) / self.forwards if self.drafts else None

    @property
    def recomputing_seconds(self) -> float:
        """At most what ``recomputed_tokens`` took, of one engine; 0 where the log does not say what its prompts took.

        Their share of what steps that read prompts took longer than the decoding of as many requests, or, where no step of the
        phase only decoded, of all that these took.
        """
        if not self.recomputed_tokens or not self.prompt_tokens:
            return 0.0

        def decoding(m: StepTiming) -> float:
            near = min(self.alike, key=lambda s: (abs(s.batch - m.batch), abs(s.k - m.k)), default=None)
            return near.seconds * m.steps if near is not None else 0.0

        longer = sum(max(0.0, m.total - decoding(m)) for m in self.steps if m.prompts)
        return longer * min(1.0, self.recomputed_tokens / self.prompt_tokens)

    @property
    def shadow_tokens_per_forward(self) -> float | None:
        """What ``tokens_per_forward`` would have been while k was 0; None of a method that cannot tell."""
        return 1.0 + sum(self.shadow_per_pos) / self.shadow_rounds if self.shadow_rounds else None

    @property
    def acceptance_length(self) -> float | None:
        """vLLM's: mean tokens per target forward *that had a draft*, bonus token included; None when nothing was drafted."""
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else None


#: as the version of a token that nobody has named
UNKNOWN = -1


def disputed(versions: Tensor) -> Tensor:
    """A policy version in ``versions`` that engine and trainer do not agree on; of such a one, what the engine said."""
    return -2 - versions


class Drafts(IntEnum):
    """What drafts had to do with a token: the values of ``LogprobBatch.drafted``."""

    OFF = 0  # nothing of the batch was drafted for
    CONTROL = 1  # known to be sampled without a draft while others had one, as a stretch of the control group is
    ON = 2  # a draft was verified there, or it is not known that none was


@dataclass(frozen=True)
class ChosenStates:
    """n sampled tokens of a batch, chosen whatever they are, and the states that they were sampled from."""

    rows: Tensor  # [n] int64, of the batch
    columns: Tensor  # [n] int64
    tokens: Tensor  # [n] int64
    last: Tensor  # [n, H] output of the policy's final norm one token before, in the host's memory
    passed: int  # sampled tokens in all of this rank's log-prob passes since the weight sync, so far
    chosen: int  # and how many of them were chosen: those of a batch that never comes are missing
    noisy: bool  # did the policy drop out in a pass


@dataclass(frozen=True)
class LogprobBatch:
    """Log-probs at the moment they are about to enter the loss, padded to the longest response.

    Of a sequence that several policies sampled and of which the trainer knows the first and the last alone, ``versions`` has
    those at its first and its last sampled token and is unknown between them. What is unknown is as old as the oldest that is
    known of its sequence; where nothing is, one version old.
    """

    policy_version: int  # version of the weights that recomputed ``recomputed``
    recomputed: Tensor  # [B, T] float, by the actor, teacher-forced
    rollout: Tensor | None  # [B, T] float, by the engine while sampling; None when the trainer did not ask for them
    mask: Tensor  # [B, T] bool, True where the policy sampled the token
    versions: Tensor  # [B, T] int64 policy version that sampled each token; -1 unknown, below it ``disputed``
    drafted: Tensor  # [B, T] uint8, of ``Drafts``; in all or in no places ``OFF``
    rollout_in_loss: bool  # do the rollout log-probs enter the loss (bypass_mode, rollout_is, rollout_rs)
    lag_allowed: bool = False  # asynchronous trainer: sequences may have been sampled by older policy versions
    #: steps trained since the weight sync of ``policy_version``: the weights that recompute are newer by those
    ahead: int = 0
    no_states: str = ""  # why no batch of this run has ``states``; empty where some may
    states: ChosenStates | None = (
        None  # of some of its tokens, where the trainer's pass gave them and nothing was trained since
    )
    sampled: Tensor | None = (
        None  # [B, T] bool: by a request that this run's engines know of; None: they may have forgotten some
    )
    #: [B] float64 nats by which a row's ``rollout`` is not what the engine stated of its text, as a dtype carries it
    apart: Tensor | None = None

    @property
    def speculating(self) -> bool:
        """True if any token of the batch was sampled in a phase with drafts."""
        return bool((self.drafted != Drafts.OFF).any())

    def of(self, rows: Tensor) -> LogprobBatch:
        """Some of its sequences, by index or [B] mask."""
        names = ("recomputed", "rollout", "mask", "versions", "drafted", "sampled", "apart")
        parts: dict[str, Any] = {name: of[rows] for name in names if (of := getattr(self, name)) is not None}
        return replace(self, **parts, states=None)


@dataclass(frozen=True)
class StatedLogprobs:
    """Log-probs that enter the loss as the engine stated them, and that nobody recomputes (the trainer bypasses its own pass)."""

    policy_version: int  # of the last weight sync
    rollout: Tensor  # [B, T] float, by the engine while sampling
    mask: Tensor  # [B, T] bool, True where the policy sampled the token
    versions: Tensor  # [B, T] int64, as in ``LogprobBatch``
    drafted: Tensor  # [B, T] uint8, as there
    lag_allowed: bool = False
    sampled: Tensor | None = (
        None  # [B, T] bool: by a request that this run's engines know of; None: they may have forgotten some
    )
    apart: Tensor | None = None  # [B] float64, as there


@dataclass(frozen=True)
class Check:
    """Outcome of one check of the self-test."""

    name: str
    passed: bool
    detail: str  # numbers, in one line
    out_of_time: bool = False  # not passed only because the time limit came first: nothing was found wrong
    unproven: bool = False  # nothing was found wrong with drafts, but what it is there to prove is not proven


#: steps of one kind that say what such a step takes
_COUNTS = 8


class SelfTestPart(Enum):
    """Which part of the self-test."""

    ALL = "all"
    START = "start"  # before anything is drafted: greedy tokens, and what steps cost
    DRAFTS = "drafts"  # before a draft is served: all but what steps cost

    @property
    def share(self) -> float:
        """Of ``spec.self_test_seconds``: what samples and switching prove takes as long in either of their parts."""
        return 0.5 if self is SelfTestPart.START else 1.0


@dataclass(frozen=True)
class SelfTestReport:
    """Outcome of the start-up self-test on the engine that will roll out."""

    checks: tuple[Check, ...]
    seconds: float
    steps: tuple[StepTiming, ...] = ()  # that the calibration ran

    @property
    def passed(self) -> bool:
        """True if no check found anything wrong; those that are ``unproven`` count as passed."""
        return all(c.passed for c in self.checks)

    @property
    def unproven(self) -> tuple[Check, ...]:
        """What is not proven, although nothing was found wrong with drafts."""
        return tuple(c for c in self.checks if c.unproven)

    @property
    def out_of_time(self) -> bool:
        """True when it did not pass, and only for want of time."""
        return not self.passed and all(c.passed or c.out_of_time for c in self.checks)

    @property
    def break_even(self) -> dict[float, float]:
        """Batch size -> acceptance length from which the largest k that was run is faster than plain decoding."""
        k = max((s.k for s in self.steps), default=0)
        plain = {s.batch: s.seconds for s in self.steps if s.k == 0 and s.paused}
        drafting = {s.batch: s.seconds for s in self.steps if s.k == k > 0 and s.steps >= _COUNTS}
        return {batch: drafting[batch] / plain[batch] for batch in sorted(drafting.keys() & plain.keys())}

    def failures(self) -> str:
        """The failed checks with their numbers, one per line."""
        return "\n".join(f"  {c.name}: {c.detail}" for c in self.checks if not c.passed)
