"""FaultTour: a plugin that breaks every guarded hook of one run in turn, and heals it again, to test law 6 and law 3.

Then it has the engine itself say something wrong, of a log-prob and of a policy version, and sees whether the guard refuses
what the adapter makes of that. The last wrong thing, a NaN, is not forgiven: it must stop the run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, ClassVar

from spec_plugin.api.errors import LogprobProvenanceError
from spec_plugin.api.events import HiddenStates, LogprobBatch, RolloutStats, StatedLogprobs
from spec_plugin.api.hookspecs import hookimpl
from spec_plugin.api.method import Method
from spec_plugin.api.ranks import is_first
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin_conformance.plants import LOGPROB, NAN, PERTURBED, PLANTED, VERSION, PlantedErrors
from spec_plugin_conformance.sessions import session_of, watch_sessions

#: the hooks that break, in this order; ``spec_save`` breaks when a checkpoint comes, wherever the tour is then
TOUR = (
    "spec_engine_ready",
    "spec_rollout_start",
    "spec_rollout_end",
    "spec_target_forward",
    "spec_train_draft",
    "spec_weight_sync",
    "spec_draft_weights",
    "spec_refreshed",
    "spec_schedule",
    "spec_metrics",
)
#: those whose failure costs a warning, and no drafts
HARMLESS = ("spec_metrics", "spec_save")
#: of an asynchronous trainer, phases after a refusal in which what was planted before may still come, and those to wait for that
#: before something else is planted; and by what the guard's reason is recognised
_LATE, _SETTLED = 6, 3
_MARKS = (f"={PERTURBED:.4f}", "not sampled by policy version")
#: what the engine says wrong afterwards, and steps in which the guard must have refused it
WRONG, PATIENCE = (LOGPROB, VERSION, NAN), 3
#: each stop takes a phase that drafts and one that does not; some slack, and the planted violations
STEPS = 2 * len(TOUR) + len(WRONG) * PATIENCE + 8

watch_sessions()


class FaultTour:
    """Raises once in each hook of ``TOUR``, waits for a phase, to be plain unless the hook is one of ``HARMLESS``, clears the
    failure, and waits for drafts again.

    At the end the guard's ``LogprobProvenanceError`` of a NaN must stop the run; where the guard has seen none, the tour raises
    one itself. ``<folder>/faults.jsonl`` tells the story.
    """

    stops: ClassVar[tuple[str, ...]] = TOUR

    def __init__(self, folder: str) -> None:
        """Write into this folder, which may be missing."""
        self._file = Path(folder) / "faults.jsonl"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._pending = list(self.stops)
        self._plants, self._wrong = PlantedErrors(Path(folder)), list(WRONG)
        self._planted: str | None = None  # what the engine says wrong now, or did a moment ago
        self._refused = False  # by the guard, since then
        self._patience = 0
        self._lags = False  # may a batch be of phases that are long over
        self._since = _LATE  # phases since something was refused
        self._saved = False
        self._broken: str | None = None  # the hook that has broken and is not healed
        self._noticed = False  # k was chosen since
        self._plain = False  # the phase in progress shows what became of it
        self._drafting = False  # there were drafts since the last healing
        self._version = -1

    def _write(self, event: str, **what: Any) -> None:
        when = {"policy_version": self._version, "time": time.time(), "pid": os.getpid()}
        with self._file.open("a") as file:
            file.write(json.dumps({"event": event} | when | what) + "\n")

    def _session(self) -> SpecSession:
        session = session_of(self)
        assert session is not None, "the tour is a plugin of a session"
        return session

    def _stop_at(self, hook: str) -> None:
        if self._broken is not None or not (self._drafting or hook == "spec_engine_ready"):
            return
        if hook == "spec_save" and not self._saved:
            self._saved = True
        elif self._pending[:1] == [hook]:
            self._pending.pop(0)
        else:
            return
        self._broken, self._noticed = hook, hook == "spec_schedule"
        self._write("broken", hook=hook)
        raise RuntimeError(f"{hook} broken: {PLANTED}")

    @hookimpl
    def spec_configure(self, method: Method) -> None:
        never = ["spec_refreshed"] * (method.draft is None) + ["spec_target_forward"] * (method.harvest is None)
        self._pending = [hook for hook in self._pending if hook not in never]
        self._write("begins", stops=self._pending)

    @hookimpl
    def spec_engine_ready(self) -> None:
        self._stop_at("spec_engine_ready")

    @hookimpl
    def spec_schedule(self) -> None:
        # from here on a broken session must not draft
        self._noticed = self._broken is not None
        self._stop_at("spec_schedule")

    @hookimpl
    def spec_rollout_start(self, policy_version: int) -> None:
        self._version = policy_version
        # plain when the session was broken before k was chosen
        self._plain = self._broken is not None and self._noticed
        if self._pending[:1] == ["spec_engine_ready"] and self._broken is None:
            self._pending.pop(0)  # the self-test never reported; the checks will miss it
        self._since += 1
        settled = not self._lags or self._since > _SETTLED
        if self._healthy and self._wrong and self._planted is None and settled:
            self._planted, self._refused, self._patience = self._wrong.pop(0), False, PATIENCE
            self._plants.plant(self._planted)
            self._write("planted", what=self._planted)
        self._stop_at("spec_rollout_start")

    @hookimpl
    def spec_rollout_end(self, stats: RolloutStats) -> None:
        # an asynchronous trainer has phases that sample nothing: they show nothing
        if self._plain and not (stats.tokens or stats.drafts):
            return
        if self._plain:
            session = self._session()
            why = str(session.failure)
            self._write("plain", hook=self._broken, drafts=stats.drafts, tokens=stats.tokens, why=why)
            session.failure = None
            self._broken, self._plain, self._noticed, self._drafting = None, False, False, False
        elif self._broken is None and stats.drafts:
            self._drafting = True
            self._write("drafting", drafts=stats.drafts)
        self._stop_at("spec_rollout_end")

    @hookimpl
    def spec_target_forward(self, hidden: HiddenStates) -> None:
        self._stop_at("spec_target_forward")

    @hookimpl
    def spec_train_draft(self) -> None:
        if self._planted is not None and not self._refused:
            self._patience -= 1
            if not self._patience:
                self._write("missed", what=self._planted)
                self._remove_planted()
                self._planted = None
        self._stop_at("spec_train_draft")

    @hookimpl
    def spec_weight_sync(self) -> None:
        self._stop_at("spec_weight_sync")

    @hookimpl
    def spec_draft_weights(self) -> None:
        self._stop_at("spec_draft_weights")

    @hookimpl
    def spec_refreshed(self) -> None:
        self._stop_at("spec_refreshed")

    @hookimpl
    def spec_metrics(self) -> dict[str, float]:
        self._stop_at("spec_metrics")
        return {}

    @hookimpl
    def spec_save(self, path: Path) -> None:
        self._stop_at("spec_save")

    @property
    def _healthy(self) -> bool:
        """True once every hook has failed and recovered."""
        return not self._pending and self._broken is None and self._drafting

    def _remove_planted(self) -> None:
        assert self._planted is not None
        self._plants.remove(self._planted)

    @hookimpl(wrapper=True)
    def spec_check_logprobs(self, batch: LogprobBatch) -> Generator[None, Any, Any]:
        """Let the guard refuse what is planted.

        Raises:
            LogprobProvenanceError: at the end of the tour; this must stop the run.
        """
        return (yield from self._around(batch.lag_allowed))

    @hookimpl(wrapper=True)
    def spec_check_stated(self, batch: StatedLogprobs) -> Generator[None, Any, Any]:
        """The same for log-probs that nobody recomputes.

        Raises:
            LogprobProvenanceError: at the end of the tour; this must stop the run.
        """
        return (yield from self._around(batch.lag_allowed))

    def _around(self, lag_allowed: bool) -> Generator[None, Any, Any]:
        """Remove a planted error once the guard has refused it; text that was in flight then may still come later."""
        self._lags = self._lags or lag_allowed
        if lag_allowed and VERSION in self._wrong:
            self._wrong.remove(VERSION)  # nothing is wrong with an older one
        if self._healthy and not self._wrong and self._planted is None:
            self._write("violation")
            raise LogprobProvenanceError(f"log-probs of another model, {PLANTED}")
        try:
            found = yield
        except LogprobProvenanceError as error:
            if self._is_late(str(error)):
                return self._forgive()
            if self._planted is None:
                if is_first() or not self._plants.any_yet:
                    raise
                return self._forgive()  # the first rank planted it, and sees to it; ranks may share a batch
            self._since = 0
            if not self._refused:
                self._write("refused", what=self._planted, why=str(error))
            if self._planted == NAN:
                self._write("violation")
                raise
            if not self._refused:
                self._remove_planted()
            self._refused = True
            return self._forgive()
        if self._refused:
            self._planted, self._refused = None, False
        return found

    def _is_late(self, why: str) -> bool:
        """True if this is about an error refused some phases ago: an asynchronous trainer had its text in a queue."""
        before = any(mark in why for mark in _MARKS) and "=nan" not in why
        return self._lags and before and self._since <= _LATE and self._planted in (None, NAN)

    def _forgive(self) -> None:
        """Clear the guard's refusal, on which the session would insist."""
        self._session().refused = None


class ShortTour(FaultTour):
    """One broken hook instead of all, for checks that want no more than a plain phase and what the engine says wrong."""

    stops: ClassVar[tuple[str, ...]] = ("spec_rollout_end",)


#: that it takes
SHORT = len(WRONG) * PATIENCE + 8


def read_tour(folder: Path) -> list[dict[str, Any]]:
    """The events that the tour wrote in ``folder``, in order; empty if it wrote none."""
    file = folder / "faults.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
