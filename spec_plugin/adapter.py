"""The door: everything that an adapter imports of spec-plugin, and the one module that it imports.

The actor's side: ``SpecRun``, with a link to the engines. The engine's side: ``EngineFront`` in the process that owns vLLM's
``AsyncLLM``, ``SpecWorkerExtension`` inside its workers. How to write an adapter: ``examples/minimal_adapter``.

A name is imported when it is first asked for: an actor loads no vLLM for this module, and a check of options no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spec_plugin.actor.control import RolloutControl as RolloutControl
    from spec_plugin.actor.control import RolloutHarvest as RolloutHarvest
    from spec_plugin.actor.control import run_blocking as run_blocking
    from spec_plugin.actor.decoder import find_decoder as find_decoder
    from spec_plugin.actor.harvest import PackedShards as PackedShards
    from spec_plugin.actor.harvest import chosen as chosen
    from spec_plugin.actor.harvest import response_at_the_end as response_at_the_end
    from spec_plugin.actor.harvest import responses_at_the_end as responses_at_the_end
    from spec_plugin.actor.judged import chosen_to_recompute as chosen_to_recompute
    from spec_plugin.actor.links import ActorsLink as ActorsLink
    from spec_plugin.actor.links import EngineLink as EngineLink
    from spec_plugin.actor.links import LocalLink as LocalLink
    from spec_plugin.actor.links import merge_stats as merge_stats
    from spec_plugin.actor.run import Harvest as Harvest
    from spec_plugin.actor.run import Responses as Responses
    from spec_plugin.actor.run import SpecRun as SpecRun
    from spec_plugin.config import SpecConfig as SpecConfig
    from spec_plugin.engine.calls import EngineCalls as EngineCalls
    from spec_plugin.engine.calls import SpecEngineMethods as SpecEngineMethods
    from spec_plugin.engine.extension import SpecWorkerExtension as SpecWorkerExtension
    from spec_plugin.engine.front import EngineFront as EngineFront
    from spec_plugin.errors import LogprobProvenanceError as LogprobProvenanceError
    from spec_plugin.errors import LosslessError as LosslessError
    from spec_plugin.errors import PatchError as PatchError
    from spec_plugin.errors import SpecConfigError as SpecConfigError
    from spec_plugin.errors import WrongOrderError as WrongOrderError
    from spec_plugin.errors import pass_on as pass_on
    from spec_plugin.events import Check as Check
    from spec_plugin.events import DraftRefresh as DraftRefresh
    from spec_plugin.events import EngineState as EngineState
    from spec_plugin.events import HiddenStates as HiddenStates
    from spec_plugin.events import RefreshReport as RefreshReport
    from spec_plugin.events import RolloutStats as RolloutStats
    from spec_plugin.events import Schedule as Schedule
    from spec_plugin.events import SelfTestReport as SelfTestReport
    from spec_plugin.events import TargetInfo as TargetInfo
    from spec_plugin.logs import configure_logging as configure_logging
    from spec_plugin.ranks import actor_group as actor_group
    from spec_plugin.ranks import is_first as is_first
    from spec_plugin.ranks import of_first as of_first
    from spec_plugin.ranks import together as together
    from spec_plugin.session import SpecSession as SpecSession

#: where each of them lives; a test holds it against the imports above, which are for type checkers
_HOMES: dict[str, str] = {
    "actor.control": "RolloutControl RolloutHarvest run_blocking",
    "actor.decoder": "find_decoder",
    "actor.harvest": "PackedShards chosen response_at_the_end responses_at_the_end",
    "actor.judged": "chosen_to_recompute",
    "actor.links": "ActorsLink EngineLink LocalLink merge_stats",
    "actor.run": "Harvest Responses SpecRun",
    "config": "SpecConfig",
    "engine.calls": "EngineCalls SpecEngineMethods",
    "engine.extension": "SpecWorkerExtension",
    "engine.front": "EngineFront",
    "errors": "LogprobProvenanceError LosslessError PatchError SpecConfigError WrongOrderError pass_on",
    "events": "Check DraftRefresh EngineState HiddenStates RefreshReport RolloutStats Schedule SelfTestReport "
    "TargetInfo",
    "logs": "configure_logging",
    "ranks": "actor_group is_first of_first together",
    "session": "SpecSession",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    """The name, from the module where it lives."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"spec_plugin.{home}"), name)
    return found


def __dir__() -> list[str]:
    return __all__
