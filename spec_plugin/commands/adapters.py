"""The adapters that are installed here, and what each has for one of the commands; no command has code for one trainer."""

from __future__ import annotations

from importlib import import_module, metadata
from types import ModuleType

ADAPTER_GROUP = "spec_plugin_adapters"
#: where an adapter whose import is itself the flag has its parts of commands, which must not set it
COMMANDS_GROUP = "spec_plugin_adapter_commands"


def installed_adapters() -> dict[str, metadata.EntryPoint]:
    """Entry points of the group ``spec_plugin_adapters``, by the trainer's name."""
    return {entry.name: entry for entry in metadata.entry_points(group=ADAPTER_GROUP)}


def module_for(entry: metadata.EntryPoint, command: str) -> str:
    """Where an adapter has its part of a command.

    Args:
        entry: the adapter's.
        command: ``check`` or ``doctor``.

    Returns:
        The module ``command`` of the package that an entry point of the adapter's name in the group
        ``spec_plugin_adapter_commands`` says; where there is none, of the adapter itself.
    """
    (beside,) = [*metadata.entry_points(group=COMMANDS_GROUP, name=entry.name)][:1] or [entry]
    return f"{beside.module}.{command}"


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
