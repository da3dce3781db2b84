"""The plugin manager: built-ins first, then everybody else's entry points, through the same door."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pluggy

from draft_training.errors import CheckpointError
from draft_training.files import refuse_code
from spec_plugin.api import hookspecs
from spec_plugin.api.answers import type_and_value
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.api.method import Method
from spec_plugin.methods.fit import refuse_two_policies, refuse_unfit
from spec_plugin.plan.engine_class import keeps_states
from spec_plugin.plan.hub import draft_folder, folder_without_code
from spec_plugin.plan.refusals import refusing

ENTRY_POINT_GROUP = "spec_plugin"


class _Manager(pluggy.PluginManager):
    """Knows our hooks, and looks for them among methods only.

    pluggy (1.6 does, later ones do not) reads every attribute of a plugin, and so computes properties before it is configured.
    """

    def __init__(self) -> None:
        super().__init__(hookspecs.PROJECT)
        self.add_hookspecs(hookspecs)

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        """What pluggy finds, but nothing for a property."""
        if isinstance(getattr(type(plugin), name, None), property | functools.cached_property):
            return None
        return super().parse_hookimpl_opts(plugin, name)


def create_manager(
    block: Iterable[str] = (), extra: Iterable[str] = (), load_entry_points: bool = True
) -> pluggy.PluginManager:
    """A manager with fresh built-in plugins, and third parties' from the entry point group ``spec_plugin``.

    A third party's plugin under the name of a blocked built-in one replaces it.

    Args:
        block: names of plugins that must not be registered.
        extra: plugins without an entry point, ``module:attribute`` or ``module:Class=argument``.
        load_entry_points: False leaves third parties' plugins out.

    Raises:
        SpecConfigError: if ``block`` names no known plugin, or a third party's plugin cannot be imported or is malformed.
    """
    from spec_plugin.lifecycle.registry import (
        built_in_plugins,  # late: it imports torch, and `spec-plugin --help` should not
    )

    manager = _Manager()
    blocked, builtins = set(block), built_in_plugins()
    foreign = {ep.name: ep for ep in entry_points(group=ENTRY_POINT_GROUP)} if load_entry_points else {}
    if unknown := blocked - set(builtins) - set(foreign):
        known = ", ".join(sorted({*builtins, *foreign}))
        raise SpecConfigError(f"spec.block: no plugin named {', '.join(map(repr, sorted(unknown)))}; known: {known}")
    for name, plugin in builtins.items():
        if name not in blocked:
            manager.register(plugin, name=name)
    for name, ep in foreign.items():
        if name not in blocked or name in builtins:
            _register_entry_point(manager, ep)
    for spec in extra:
        _register_extra(manager, spec)
    return manager


def built_in_method(config: SpecConfig, target: TargetInfo, fetch: bool = False) -> Method | None:
    """How a run with one of our own methods would draft; None: the method is a plugin's. Loads no torch.

    Args:
        config: of the run.
        target: the policy.
        fetch: a draft of the hub that is not on this machine.

    Raises:
        DraftNotHereError: if it is not, and is not to be fetched.
        SpecConfigError: if the method cannot work with this target.
    """
    from spec_plugin.lifecycle.registry import built_in_methods

    manager = _Manager()
    for name, plugin in built_in_methods().items():
        manager.register(plugin, name=name)
    return ask_method(config, target, manager, fetch)


def ask_method(
    config: SpecConfig, target: TargetInfo, manager: pluggy.PluginManager, fetch: bool = True
) -> Method | None:
    """How the run drafts, from the first plugin that knows; whoever that is, a draft that brings code is refused (law 8).

    vLLM reads a draft's config.json with the *policy's* ``trust_remote_code``, so that code beside it would run unasked.

    Raises:
        SpecConfigError: if a plugin refuses this target, the draft names code, or would end while the run goes on.
    """
    refuse_two_policies(target)
    if config.draft is not None:
        config = config.model_copy(update={"draft": draft_folder(config.draft, fetch)})
    if (
        config.draft is not None and Path(config.draft).resolve() != Path(target.path).resolve()
    ):  # that is trusted, or not
        # of what cannot be read the method says so, in its own words
        with refusing(f"spec.draft={config.draft!r} is refused"), suppress(CheckpointError):
            refuse_code(Path(config.draft))
        config = config.model_copy(update={"draft": str(folder_without_code(Path(config.draft)))})
    found: Method | None = manager.hook.spec_method(config=config, target=target)
    if isinstance(found, Method):
        refuse_unfit(found, config, target)
    return found


def method_of(config: SpecConfig, target: TargetInfo, manager: pluggy.PluginManager) -> Method:
    """How the run drafts, from the first plugin that knows.

    Raises:
        SpecConfigError: if no plugin knows ``config.method``, or the one that does refuses this target.
    """
    found = ask_method(config, target, manager)
    if found is None:
        names = sorted(n for n, _ in manager.list_name_plugin())
        meant = "".join(f" (did you mean {name!r}?)" for name in get_close_matches(config.method, names, n=1))
        raise SpecConfigError(
            f"spec.method={config.method!r}: no active plugin provides it{meant}; active plugins: {', '.join(names)}. Correct "
            "the name, install the plugin that has it, or take it out of spec.block"
        )
    if not isinstance(found, Method):
        raise SpecConfigError(
            f"spec.method={config.method!r}: a plugin's spec_method returned {type_and_value(found)}; expected a "
            "spec_plugin.api.method.Method"
        )
    # recurrent states stand behind k drafted tokens or none, see spec_plugin.engine.recurrent_states
    return replace(found, all_or_nothing_k=True) if keeps_states(target.hf_config) else found


def call_each(
    manager: pluggy.PluginManager, hook: str, each: Callable[[str, Callable[[], object]], object], **arguments: object
) -> Any:
    """Call a hook as pluggy does, wrappers around all others, but let ``each`` make the call of each one that is no wrapper.

    Args:
        manager: whose plugins are called.
        hook: its name.
        each: takes a plugin's name and the call of its implementation; what it returns or raises is what pluggy and the
            wrappers take for that implementation's.
        arguments: of the hook.

    Returns:
        What the outermost wrapper returns; without one, the list of all answers but None, in the order of the calls.

    Raises:
        BaseException: what ``each`` or a wrapper raises.
    """
    wrappers = _Manager()
    implementations = getattr(manager.hook, hook).get_hookimpls()
    wrapping = {found.plugin_name for found in implementations if found.wrapper or found.hookwrapper}
    for name, plugin in manager.list_name_plugin():  # in the order in which they came, which decides who is around whom
        if name in wrapping:
            wrappers.register(plugin, name=name)
    others = [_called_by(each, found) for found in implementations if found.plugin_name not in wrapping]
    return getattr(wrappers.hook, hook).call_extra(others, arguments)


def _called_by(
    each: Callable[[str, Callable[[], object]], object], implementation: pluggy.HookImpl
) -> Callable[..., object]:
    @functools.wraps(implementation.function)  # pluggy reads its arguments' names
    def call(*args: object, **kwargs: object) -> object:
        return each(implementation.plugin_name, functools.partial(implementation.function, *args, **kwargs))

    return call


def _register_extra(manager: pluggy.PluginManager, spec: str) -> None:
    place, has_argument, argument = spec.partition("=")
    try:
        module, _, attribute = place.partition(":")
        plugin: Any = importlib.import_module(module)
        plugin = getattr(plugin, attribute) if attribute else plugin
        if isinstance(plugin, type):
            plugin = plugin(argument) if has_argument else plugin()
        manager.register(plugin, name=place)
        manager.check_pending()
        if not manager.get_hookcallers(plugin):
            raise ValueError(
                "it has no function that is named after a hook and marked with hookimpl; see `spec-plugin hooks`"
            )
    except Exception as error:
        raise SpecConfigError(
            f"spec.plugins: {spec!r} cannot be registered: {type(error).__name__}: {error}; expected module:attribute, or "
            "module:Class=argument"
        ) from error


def _register_entry_point(manager: pluggy.PluginManager, ep: EntryPoint) -> None:
    try:
        plugin = ep.load()
        plugin = plugin() if isinstance(plugin, type) else plugin
        manager.register(plugin, name=ep.name)
        manager.check_pending()
    except Exception as error:
        raise SpecConfigError(
            f"plugin {ep.name!r} ({ep.value}) cannot be registered: {error}. "
            f"Fix or uninstall it, or leave it out with spec.block=[{ep.name}]"
        ) from error
