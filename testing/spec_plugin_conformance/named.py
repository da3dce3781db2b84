"""What an adapter tells ``SpecRun`` that was done to responses on purpose: only that is taken off what a guard must see."""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.trainer.log_probs import Responses
from spec_plugin.trainer.spec_run import SpecRun
from spec_plugin_conformance.watch import Write

_writes: WeakKeyDictionary[SpecSession, Write] = WeakKeyDictionary()


def watch_named(session: SpecSession, write: Write) -> None:
    """Record the log-probs of the rows that an adapter of this session says to be cut (``Responses.cut``)."""
    for name in ("check", "check_stated"):
        if not hasattr(original := getattr(SpecRun, name), "__wrapped__"):
            setattr(SpecRun, name, _noting(original))
    _writes[session] = write


def _noting(original: Any) -> Any:
    @functools.wraps(original)
    def check(self: SpecRun, responses: Responses, *args: Any, **kwargs: Any) -> Any:
        write, cut, rollout = _writes.get(self.session), responses.cut, responses.rollout
        if write is not None and cut is not None and rollout is not None and bool(cut.any()):
            rows = (rollout[i][responses.mask[i]].tolist() for i in cut.nonzero().flatten().tolist())
            write("rows_cut", rows=list(rows))
        return original(self, responses, *args, **kwargs)

    return check
