"""Whether a run drafts in a step, and why or why not: the numbers of the metrics ``spec/state`` and ``spec/reason``."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import groupby

from spec_plugin.api.events import EngineSchedule

_SHOWN_SIZES = (1, 8, 32)


class _Code(IntEnum):
    """A number, since trainers log floats, and what it means. A number is never given another meaning."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> _Code:
        """A member from its number and its meaning."""
        member = int.__new__(cls, value)
        member._value_, member.meaning = value, meaning
        return member


class Speculation(_Code):
    """Values of the metric ``spec/state``: whether a step drafts."""

    UNTRIED = 0, "no draft was served yet"
    TRYING = 1, "drafts are tried in one rollout, to measure what they do"
    SERVING = 2, "the engines draft"
    DROPPED = 3, "the engines began to draft and dropped the draft within the rollout"
    RESTING = 4, "the engines decode without drafts, by choice"
    FORBIDDEN = 5, "the user has turned drafts off; the draft is only trained"
    RECOVERING = 6, "the plain rollout with which a fresh start after trouble begins"
    FAILED = 7, "off after trouble with drafts; a fresh start may follow"
    GIVEN_UP = 8, "off after trouble with drafts, to the end of the run"


class Reason(_Code):
    """Values of the metric ``spec/reason``: below 10 why it drafts, from 20 to 29 what has failed, else why it chose not to."""

    PREDICTED_TO_PAY = 0, "drafting is predicted to pay"
    ASKED_FOR = 1, "the user asked for drafts throughout (serve=always)"
    A_TRY = 2, "an unserved draft is tried in one rollout"
    NO_DRAFT_YET = 10, "no draft had been trained, and none measured yet"
    COST_UNKNOWN = 11, "what drafting costs on this engine is not known"
    BELOW_BREAK_EVEN = 12, "drafts make too few tokens to pay"
    COMPARISON = 14, "one plain rollout, to compare those with drafts with"
    NO_ROOM = 15, "the engine's sampler has no memory for drafted tokens"
    SERVE_NEVER = 16, "serve=never"
    FRESH_START = 17, "a plain rollout before drafts are tried again"
    DECIDED_ELSEWHERE = 18, "another plugin decided, or the engines began before the controller had"
    HARVEST = 20, "trouble in the harvest of hidden states"
    TRAINING = 21, "trouble in draft training"
    REFRESH = 22, "trouble in a refresh of the engines' draft"
    SCHEDULE = 23, "trouble in choosing or setting how much is drafted"
    SELF_TEST = 24, "trouble in the self-test: it failed, or did not end"
    ENGINES = 25, "trouble in talking to the engines"
    CHECKPOINT = 26, "trouble in saving or loading"
    OTHER_TROUBLE = 27, "trouble elsewhere"
    OTHER_RANK = 28, "trouble on another rank"
    NOT_WAITED_FOR = 30, "the trainer does not wait for rollouts: they end behind its own work, with drafts or without"
    NO_OUTLOOK = (
        31,
        "no draft can come to pay at the batch sizes that run: none is trained, but for a look now and then",
    )

    @property
    def work(self) -> str:
        """The draft work that has failed, for people: ``refresh``, ``self-test``."""
        return self.name.lower().replace("_", "-")


_STATES = {
    Reason.PREDICTED_TO_PAY: Speculation.SERVING,
    Reason.ASKED_FOR: Speculation.SERVING,
    Reason.A_TRY: Speculation.TRYING,
    Reason.NO_DRAFT_YET: Speculation.UNTRIED,
    Reason.SERVE_NEVER: Speculation.FORBIDDEN,
    Reason.FRESH_START: Speculation.RECOVERING,
}


def state_of(reason: Reason) -> Speculation:
    """The state of a run that does what it does for this reason, if nothing is known beyond it."""
    if Reason.HARVEST <= reason <= Reason.OTHER_RANK:
        return Speculation.FAILED
    return _STATES.get(reason, Speculation.RESTING)


def as_metrics(reason: Reason, state: Speculation | None = None) -> dict[str, float]:
    """Both metrics; the state is ``state_of`` the reason unless it is given."""
    return {"spec/state": float(state_of(reason) if state is None else state), "spec/reason": float(reason)}


def sizes_shown(most: int) -> list[int]:
    """Batch sizes whose numbers are logged, of 1 to ``most``."""
    return [b for b in (*_SHOWN_SIZES, most) if 0 < b <= most]


def in_words(table: Sequence[int]) -> str:
    """A table in words: ``k=3 for batch size 1-8, k=1 for 9-20, k=0 from 21``."""
    if not any(table):
        return "no drafts at any batch size"
    parts: list[str] = []
    for k, same in groupby(range(1, len(table)), table.__getitem__):
        sizes = list(same)
        span = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]}-{sizes[-1]}"
        last = sizes[-1] == len(table) - 1
        where = f"from {sizes[0]}" if last else span if not parts else f"for {span}"
        parts.append(f"k={k} {where}" if parts else f"k={k} for batch size {where}")
    return ", ".join(parts)


def table_metrics(engines: EngineSchedule) -> dict[str, float]:
    """``spec/on`` and ``spec/k_b…``: what the engines have confirmed, whatever was chosen for them."""
    table = () if engines.confirmed is None else engines.confirmed.table
    return {"spec/on": float(engines.drafting)} | {f"spec/k_b{b}": float(table[b]) for b in sizes_shown(len(table) - 1)}


def in_force(
    chosen: float | None,
    engines: EngineSchedule | None,
    plain_for: Reason | None,
    trouble: Reason | None,
    for_good: bool,
) -> dict[str, float]:
    """What is to be logged over the controller's own choice, where more is known; nothing where it holds.

    Args:
        chosen: ``spec/state`` of the controller; None without one.
        engines: what they have confirmed; None: nobody has asked them.
        plain_for: why the controller was not asked, and this rollout is plain; None: it was.
        trouble: in what, while it has turned drafts off.
        for_good: and no fresh start follows.
    """
    if trouble is not None:
        return as_metrics(trouble, Speculation.GIVEN_UP if for_good else Speculation.FAILED)
    if plain_for is not None:
        return as_metrics(plain_for)
    if engines is None:
        return as_metrics(Reason.NO_DRAFT_YET) if chosen is None else {}
    drafting = engines.drafting
    known = chosen is not None and drafting == (chosen in (Speculation.TRYING, Speculation.SERVING))
    if known or chosen == Speculation.DROPPED:  # it began to draft, whatever it does now
        return {}
    return as_metrics(Reason.DECIDED_ELSEWHERE, Speculation.SERVING if drafting else Speculation.RESTING)
