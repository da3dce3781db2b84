"""Repairs of a library's own functions, each with its reason, its probe and its guard; ``spec-plugin doctor`` lists them.

A patch is applied only while the fault it repairs is really there (a probe of behaviour, never a version number), only
where it still fits (a guard on the symbol's signature and on the source lines that the replacement relies on), and only
if the probe finds the fault gone afterwards. Anything else raises :class:`~spec_plugin.api.errors.PatchError`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from spec_plugin.api.errors import PatchError


@dataclass(frozen=True)
class Guard:
    """What a replacement relies on in the symbol that it replaces."""

    parameters: tuple[str, ...] | None  # names of the parameters, in order; None: it takes what the original takes
    landmarks: tuple[str, ...]  # pieces of source text that must still be there, e.g. the call that carries the fault


@dataclass(frozen=True)
class Patch:
    """One repair of one function of a library."""

    name: str  # how a user names it, e.g. in ``skip_patches``
    symbol: str  # "module:attribute.path"
    reason: str  # what goes wrong without it
    upstream: str  # issue and pull request
    versions: str  # where the fault was seen, and where this replacement was checked
    needed: Callable[[Callable[..., Any]], bool]  # takes the function, runs it on tiny inputs: is the fault there?
    replacement: Callable[[Callable[..., Any]], Callable[..., Any]]  # takes the original, returns the repaired function
    guard: Guard
    optional: bool = False  # versions that lack the function have no use for its repair
    moved_to: tuple[str, ...] = ()  # where other versions keep the same function; the first that exists is patched


@dataclass(frozen=True)
class PatchStatus:
    """What became of one patch in this process."""

    name: str
    symbol: str
    state: Literal["in force", "not needed", "skipped"]
    detail: str


_originals: dict[
    str, tuple[Any, str, Callable[..., Any]]
] = {}  # patch name -> owner, attribute, library's own function
statuses: dict[str, PatchStatus] = {}  # patch name -> what became of it in this process


def apply(patch: Patch) -> PatchStatus:
    """Apply a patch if its fault is present; safe to call again.

    Returns:
        The status: "in force", or "not needed" where upstream has repaired the function.

    Raises:
        PatchError: if the symbol is gone, changed so that the replacement may not fit, or is still faulty afterwards.
    """
    if patch.name in _originals:
        return statuses[patch.name]
    try:
        owner, attribute, original = resolve(patch)
    except PatchError:
        if not patch.optional:
            raise
        return _record(patch, "not needed", "this version has no such function")
    if not _probe(patch, original, "the library's own function"):
        return _record(patch, "not needed", "fixed upstream: the probe finds no fault in the library's own function")
    _check_guard(patch, original)
    repaired = patch.replacement(original)
    if _probe(patch, repaired, "the replacement"):
        raise PatchError(f"{_about(patch)}: the fault is still there with our replacement; {_ADVICE}")
    setattr(owner, attribute, repaired)
    _originals[patch.name] = (owner, attribute, original)
    return _record(patch, "in force", patch.reason)


def apply_each(group: Iterable[Patch], skipped: Collection[str] = ()) -> list[PatchStatus]:
    """Apply those that are not named in ``skipped``, and take back those that are.

    Raises:
        PatchError: see :func:`apply`.
    """
    return [
        skip(patch, "left out by additional_config.spec_plugin.skip_patches") if patch.name in skipped else apply(patch)
        for patch in group
    ]


def skip(patch: Patch, why: str) -> PatchStatus:
    """Leave a patch out on request, and take it back if it is in force."""
    revert(patch)
    return _record(patch, "skipped", why)


def revert(patch: Patch) -> None:
    """Put the library's own function back; does nothing for a patch that is not in force."""
    if patch.name in _originals:
        owner, attribute, original = _originals.pop(patch.name)
        setattr(owner, attribute, original)
        statuses.pop(patch.name)


_ADVICE = (
    "install a vLLM of the range that spec-plugin declares, or leave the patch out with additional_config="
    '{"spec_plugin": {"skip_patches": [NAME]}} if the new function is right, and report this'
)


def _record(patch: Patch, state: Literal["in force", "not needed", "skipped"], detail: str) -> PatchStatus:
    statuses[patch.name] = PatchStatus(patch.name, patch.symbol, state, detail)
    return statuses[patch.name]


def _about(patch: Patch) -> str:
    return f"patch {patch.name!r} of {patch.symbol} ({patch.upstream}; {patch.versions})"


def resolve(patch: Patch) -> tuple[Any, str, Callable[..., Any]]:
    """Where the function lives in the installed library: its owner, its name there, and the function as it is now.

    Raises:
        PatchError: if it is in none of the places that the patch knows.
    """
    failures = []
    for symbol in (patch.symbol, *patch.moved_to):
        module_name, _, path = symbol.partition(":")
        *parents, attribute = path.split(".")
        try:
            owner: Any = importlib.import_module(module_name)
            for parent in parents:
                owner = getattr(owner, parent)
            return owner, attribute, getattr(owner, attribute)
        except (ImportError, AttributeError) as error:
            failures.append(f"{symbol}: {error}")
    raise PatchError(f"{_about(patch)}: expected one of these symbols, found none: {'; '.join(failures)}; {_ADVICE}")


def _probe(patch: Patch, function: Callable[..., Any], which: str) -> bool:
    try:
        return patch.needed(function)
    except Exception as error:
        raise PatchError(
            f"{_about(patch)}: the probe of {which} failed with {type(error).__name__}: {error}; {_ADVICE}"
        ) from error


def _check_guard(patch: Patch, original: Callable[..., Any]) -> None:
    parameters = tuple(inspect.signature(original).parameters)
    if patch.guard.parameters is not None and parameters != patch.guard.parameters:
        raise PatchError(
            f"{_about(patch)}: expected parameters {patch.guard.parameters}, found {parameters}; {_ADVICE}"
        )
    source = inspect.getsource(original)
    missing = [mark for mark in patch.guard.landmarks if mark not in source]
    if missing:
        raise PatchError(
            f"{_about(patch)}: its source changed: expected {missing}, found none of it in {len(source)} characters of "
            f"{inspect.getsourcefile(original)}; {_ADVICE}"
        )
