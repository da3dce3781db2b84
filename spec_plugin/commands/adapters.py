"""The adapters that are installed here, and what each has for one of the commands; no command has code for one trainer."""

from __future__ import annotations

from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType

ADAPTER_GROUP = "spec_plugin_adapters"


def installed_adapters() -> dict[str, metadata.EntryPoint]:
    """Entry points of the group ``spec_plugin_adapters``, by the trainer's name."""
    return {entry.name: entry for entry in metadata.entry_points(group=ADAPTER_GROUP)}


def module_for(entry: metadata.EntryPoint, command: str) -> str:
    """Where an adapter has its part of a command.

    Args:
        entry: the adapter's.
        command: ``check`` or ``doctor``.

    Returns:
        ``<adapter>_check.<command>`` where there is such a package, as for an adapter whose import is itself the flag; else
        ``<adapter>.<command>``.
    """
    beside = f"{entry.module}_check"
    return f"{beside if find_spec(beside) else entry.module}.{command}"


def part_of(entry: metadata.EntryPoint, command: str) -> ModuleType | None:
    """The module that an adapter has for a command; None where it has none.

    Raises:
        ImportError: if it has one that cannot be imported.
    """
    name = module_for(entry, command)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name in (name, name.rpartition(".")[0]):
            return None
        raise
