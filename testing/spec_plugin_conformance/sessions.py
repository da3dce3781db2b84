"""Which session a plugin of the kit is in: hooks do not say, so each session is noted when it lets its plugins validate."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from spec_plugin.lifecycle.session import SpecSession

_SEEN: weakref.WeakSet[SpecSession] = weakref.WeakSet()


def watch_sessions() -> None:
    """Note every session of this process from now on.

    To be called by a module that has a plugin, when it is imported: the session has made its plugins before it asks them.
    """
    configure = SpecSession._configure
    if hasattr(configure, "__wrapped__"):
        return

    @functools.wraps(configure)
    def noted(self: SpecSession) -> None:
        _SEEN.add(self)
        configure(self)

    SpecSession._configure = noted  # type: ignore[method-assign]


def session_of(plugin: Any) -> SpecSession | None:
    """The session that this plugin object is registered in; None for one that is tried outside of a session."""
    return next((session for session in _SEEN if session.manager.is_registered(plugin)), None)
