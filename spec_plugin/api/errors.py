"""Errors that a user can meet; each says what was wrong, where it came from and what to do."""

from __future__ import annotations


class SpecPluginError(Exception):
    """Base class of every error that this package raises on purpose."""


class SpecConfigError(SpecPluginError, ValueError):
    """An option, or a combination of the trainer's options, cannot work. Raised before the engine starts."""


class CannotDraft(SpecConfigError):
    """No draft of this run can be made or served for this target, in the parts of an ``Objection``."""

    def __init__(self, reason: str, why: str, instead: str) -> None:
        """What stays the same from run to run, the sentence without a full stop, and what to set."""
        super().__init__(f"{why}: {instead}")
        self.reason, self.why, self.instead = reason, why, instead


class LosslessError(SpecPluginError, RuntimeError):
    """The engine that is about to roll out does not sample from the target (law 2)."""


class LogprobProvenanceError(SpecPluginError, RuntimeError):
    """A log-prob that would enter the loss is not the target's at the recorded policy version (law 3)."""


class WrongOrderError(SpecPluginError, RuntimeError):
    """An adapter has called ``SpecRun`` in an order that cannot be right: a mistake of the adapter's, whatever the run."""


class PatchError(SpecPluginError, RuntimeError):
    """A compatibility patch no longer fits the installed library: the symbol changed or upstream fixed it."""


#: Errors that stop training (laws 2 and 3, and bad configuration). Every other failure only turns speculation off (law 6).
FATAL = (SpecConfigError, LosslessError, LogprobProvenanceError, PatchError)


def stops_the_run(error: BaseException) -> BaseException | None:
    """What of this error must stop training: itself, or what it was raised for, since remote calls wrap what they carry.

    Args:
        error: any; its ``raise … from``, Ray's ``cause`` and the members of a group are looked through.

    Returns:
        One of ``FATAL``, or the user's own ending of the run; None if this is draft trouble, ``MemoryError`` among it.
    """
    waiting: list[BaseException] = [error]
    seen: set[int] = set()
    while waiting:
        found = waiting.pop(0)
        if isinstance(found, (*FATAL, KeyboardInterrupt, SystemExit)):
            return found
        if id(found) not in seen:
            seen.add(id(found))
            causes = [found.__cause__, getattr(found, "cause", None), *getattr(found, "exceptions", ())]
            waiting += [cause for cause in causes if isinstance(cause, BaseException)]
    return None


def pass_on(error: BaseException) -> None:
    """In a handler for draft trouble (law 6): what must stop training goes on.

    Raises:
        BaseException: see ``stops_the_run``.
    """
    if (fatal := stops_the_run(error)) is not None:
        raise fatal
