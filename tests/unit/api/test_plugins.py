from __future__ import annotations

import inspect
import re
import sys
import types
from importlib.metadata import EntryPoint

import pluggy
import pytest
from builders.paths import ROOT

from spec_plugin import SpecConfigError, hookimpl
from spec_plugin.api.events import RolloutStats
from spec_plugin.lifecycle import manager as plugins
from spec_plugin.lifecycle.manager import ENTRY_POINT_GROUP, create_manager

METHODS = ("eagle3", "draft_model", "mtp", "suffix", "ngram", "frozen", "auto")
BUILT_IN = (*METHODS, "trainer", "exactness", "provenance", "controller", "metrics")
README = ROOT / "README.md"


class Counter:
    @hookimpl
    def spec_metrics(self):
        return {"spec/mine": 1.0}


@pytest.fixture
def installed(monkeypatch):
    """Make objects look like plugins that other distributions publish as entry points."""

    def install(**published: object) -> None:
        points = []
        for name, plugin in published.items():
            module = types.ModuleType(f"third_party_{name}")
            module.plugin = plugin
            monkeypatch.setitem(sys.modules, module.__name__, module)
            points.append(EntryPoint(name, f"{module.__name__}:plugin", ENTRY_POINT_GROUP))
        monkeypatch.setattr(plugins, "entry_points", lambda group: points if group == ENTRY_POINT_GROUP else [])

    install()
    return install


def names(manager) -> list[str]:
    return [name for name, _ in manager.list_name_plugin()]


def test_the_built_in_plugins_come_first_in_their_order(installed):
    installed(mine=Counter)
    assert names(create_manager()) == [*BUILT_IN, "mine"]


def test_no_property_of_a_plugin_is_computed_to_find_its_hooks(monkeypatch):
    """pluggy 1.6 and earlier read every attribute, before the plugin knows anything; as here, to the letter of their source."""

    def as_it_was(self, plugin, name):
        method = getattr(plugin, name)
        if not inspect.isroutine(method):
            return None
        found = getattr(method, self.project_name + "_impl", None)
        return found if isinstance(found, dict) else None

    monkeypatch.setattr(pluggy.PluginManager, "parse_hookimpl_opts", as_it_was)
    assert names(create_manager()) == list(BUILT_IN)


@pytest.mark.parametrize("plugin", [Counter, Counter()], ids=["class", "instance"])
def test_a_third_partys_plugin_is_found_through_its_entry_point(installed, plugin):
    installed(mine=plugin)
    assert {"spec/mine": 1.0} in create_manager().hook.spec_metrics()


def test_a_module_is_a_plugin_too(installed):
    module = types.ModuleType("mine")
    module.spec_metrics = hookimpl(lambda: {"spec/mine": 2.0})
    installed(mine=module)
    assert {"spec/mine": 2.0} in create_manager().hook.spec_metrics()


def test_entry_points_can_be_left_out(installed):
    installed(mine=Counter)
    assert names(create_manager(load_entry_points=False)) == list(BUILT_IN)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_plugin_can_be_blocked_by_name(installed, name):
    assert names(create_manager(block=[name])) == [n for n in BUILT_IN if n != name]


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_plugin_can_be_replaced_under_its_name(installed, name):
    mine = Counter()
    installed(**{name: mine})
    manager = create_manager(block=[name])
    assert manager.get_plugin(name) is mine
    assert sorted(names(manager)) == sorted(BUILT_IN)


def test_a_third_partys_plugin_can_be_blocked_by_name(installed):
    installed(mine=Counter)
    assert names(create_manager(block=["mine"])) == list(BUILT_IN)


def test_taking_a_built_in_name_without_blocking_it_is_refused(installed):
    installed(metrics=Counter)
    with pytest.raises(SpecConfigError, match="'metrics'"):
        create_manager()


def test_blocking_an_unknown_name_is_answered_with_the_known_ones(installed):
    installed(mine=Counter)
    with pytest.raises(SpecConfigError, match=r"no plugin named 'egale3'") as caught:
        create_manager(block=["egale3"])
    assert all(name in str(caught.value) for name in (*BUILT_IN, "mine"))


def test_a_misspelt_hook_is_refused_and_named(installed):
    class Misspelt:
        @hookimpl
        def spec_rolout_end(self, stats):
            pass

    installed(mine=Misspelt)
    with pytest.raises(SpecConfigError, match="spec_rolout_end") as caught:
        create_manager()
    assert "'mine'" in str(caught.value) and "spec.block=[mine]" in str(caught.value)


def test_a_hook_with_an_unknown_argument_is_refused_and_named(installed):
    class Greedy:
        @hookimpl
        def spec_rollout_end(self, statistics):
            pass

    installed(mine=Greedy)
    with pytest.raises(SpecConfigError, match="statistics"):
        create_manager()


def test_a_plugin_that_cannot_be_imported_is_refused_and_named(installed, monkeypatch):
    broken = EntryPoint("mine", "no_such_module_of_mine:plugin", ENTRY_POINT_GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [broken])
    with pytest.raises(SpecConfigError, match=r"'mine' \(no_such_module_of_mine:plugin\)"):
        create_manager()


def test_the_readmes_plugin_runs(installed, capsys):
    (source,) = re.findall(r"<!-- plugin:begin -->\n```python\n(.*?)```\n<!-- plugin:end -->", README.read_text(), re.S)
    assert len([line for line in source.splitlines() if line]) <= 10
    module = types.ModuleType("readme_plugin")
    exec(compile(source, "README.md", "exec"), module.__dict__)
    installed(mine=module)
    manager = create_manager()
    stats = RolloutStats(policy_version=3, requests=2, tokens=30, seconds=1.0, drafts=10, accepted_tokens=20)
    manager.hook.spec_rollout_end(stats=stats)
    assert "30 tokens" in capsys.readouterr().out
    assert {"spec/tokens_per_second": 30.0} in manager.hook.spec_metrics()
