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
    from spec_plugin.actor.decoder import find_decoder as find_decoder
    from spec_plugin.actor.decoder import shared_with_draft as shared_with_draft
    from spec_plugin.actor.decoder import text_sizes as text_sizes
    from spec_plugin.actor.harvest import DecoderHarvest as DecoderHarvest
    from spec_plugin.actor.harvest import Documents as Documents
    from spec_plugin.actor.harvest import PackedShards as PackedShards
    from spec_plugin.actor.harvest import Piece as Piece
    from spec_plugin.actor.harvest import RolloutHarvest as RolloutHarvest
    from spec_plugin.actor.harvest import Rows as Rows
    from spec_plugin.actor.harvest import padded_rows as padded_rows
    from spec_plugin.actor.harvest import response_at_the_end as response_at_the_end
    from spec_plugin.actor.harvest import responses_at_the_end as responses_at_the_end
    from spec_plugin.actor.judged import chosen_to_recompute as chosen_to_recompute
    from spec_plugin.actor.links import ActorsLink as ActorsLink
    from spec_plugin.actor.links import EngineLink as EngineLink
    from spec_plugin.actor.links import LocalLink as LocalLink
    from spec_plugin.actor.links import merge_stats as merge_stats
    from spec_plugin.actor.rank_engines import RanksLink as RanksLink
    from spec_plugin.actor.rank_engines import random_streams_kept as random_streams_kept
    from spec_plugin.actor.run import Responses as Responses
    from spec_plugin.actor.run import SpecRun as SpecRun
    from spec_plugin.actor.taps import LAST as LAST
    from spec_plugin.actor.taps import Taps as Taps
    from spec_plugin.arguments import ENABLE as ENABLE
    from spec_plugin.arguments import PREFIX as PREFIX
    from spec_plugin.arguments import help_text as help_text
    from spec_plugin.arguments import read_config as read_config
    from spec_plugin.arguments import split_arguments as split_arguments
    from spec_plugin.blocking import callers_stream as callers_stream
    from spec_plugin.blocking import run_blocking as run_blocking
    from spec_plugin.config import NAME as NAME
    from spec_plugin.config import SpecConfig as SpecConfig
    from spec_plugin.config import meant_for_us as meant_for_us
    from spec_plugin.diagnosis import AdapterDoctor as AdapterDoctor
    from spec_plugin.diagnosis import Diagnosis as Diagnosis
    from spec_plugin.diagnosis import look_up as look_up
    from spec_plugin.diagnosis import missing_for_cpu as missing_for_cpu
    from spec_plugin.engine.calls import EngineCalls as EngineCalls
    from spec_plugin.engine.calls import SpecEngineMethods as SpecEngineMethods
    from spec_plugin.engine.configuration import configuration as configuration
    from spec_plugin.engine.configuration import planned_configuration as planned_configuration
    from spec_plugin.engine.extension import SpecWorkerExtension as SpecWorkerExtension
    from spec_plugin.engine.front import EngineFront as EngineFront
    from spec_plugin.engine.inprocess import InProcessCalls as InProcessCalls
    from spec_plugin.engine.lossless import check_sampling as check_sampling
    from spec_plugin.engine.protocol import Engine as Engine
    from spec_plugin.engine.schedule.channel import stand_aside as stand_aside
    from spec_plugin.engine.sleep import PARTS as PARTS
    from spec_plugin.engine.sleep import SleepState as SleepState
    from spec_plugin.engine_class import keeps_states as keeps_states
    from spec_plugin.errors import LogprobProvenanceError as LogprobProvenanceError
    from spec_plugin.errors import LosslessError as LosslessError
    from spec_plugin.errors import PatchError as PatchError
    from spec_plugin.errors import SpecConfigError as SpecConfigError
    from spec_plugin.errors import SpecPluginError as SpecPluginError
    from spec_plugin.errors import WrongOrderError as WrongOrderError
    from spec_plugin.errors import pass_on as pass_on
    from spec_plugin.events import Check as Check
    from spec_plugin.events import DraftRefresh as DraftRefresh
    from spec_plugin.events import EngineSchedule as EngineSchedule
    from spec_plugin.events import EngineState as EngineState
    from spec_plugin.events import HiddenStates as HiddenStates
    from spec_plugin.events import RefreshReport as RefreshReport
    from spec_plugin.events import RolloutStats as RolloutStats
    from spec_plugin.events import Schedule as Schedule
    from spec_plugin.events import SelfTestReport as SelfTestReport
    from spec_plugin.events import TargetInfo as TargetInfo
    from spec_plugin.logs import configure_logging as configure_logging
    from spec_plugin.manager import create_manager as create_manager
    from spec_plugin.ranks import actor_group as actor_group
    from spec_plugin.ranks import is_first as is_first
    from spec_plugin.ranks import of_first as of_first
    from spec_plugin.ranks import together as together
    from spec_plugin.refusals import Objection as Objection
    from spec_plugin.refusals import load_hf_config as load_hf_config
    from spec_plugin.refusals import refuse as refuse
    from spec_plugin.refusals import unsupported as unsupported
    from spec_plugin.run_plan import FindModel as FindModel
    from spec_plugin.run_plan import Model as Model
    from spec_plugin.run_plan import RunFacts as RunFacts
    from spec_plugin.run_plan import RunPlan as RunPlan
    from spec_plugin.run_plan import split_launch as split_launch
    from spec_plugin.session import SpecSession as SpecSession
    from spec_plugin.session import method_of as method_of
    from spec_plugin.sources import folder_of as folder_of
    from spec_plugin.sources import parsed as parsed
    from spec_plugin.sources import source_of as source_of
    from spec_plugin.speculation import Work as Work

#: where each of them lives; a test holds it against the imports above, which are for type checkers
_HOMES: dict[str, str] = {
    "actor.control": "RolloutControl",
    "actor.decoder": "find_decoder shared_with_draft text_sizes",
    "actor.harvest": "DecoderHarvest Documents PackedShards Piece RolloutHarvest Rows padded_rows response_at_the_end "
    "responses_at_the_end",
    "actor.judged": "chosen_to_recompute",
    "actor.links": "ActorsLink EngineLink LocalLink merge_stats",
    "actor.rank_engines": "RanksLink random_streams_kept",
    "actor.run": "Responses SpecRun",
    "actor.taps": "LAST Taps",
    "arguments": "ENABLE PREFIX help_text read_config split_arguments",
    "blocking": "callers_stream run_blocking",
    "config": "NAME SpecConfig meant_for_us",
    "diagnosis": "AdapterDoctor Diagnosis look_up missing_for_cpu",
    "engine.calls": "EngineCalls SpecEngineMethods",
    "engine.configuration": "configuration planned_configuration",
    "engine.extension": "SpecWorkerExtension",
    "engine.front": "EngineFront",
    "engine.inprocess": "InProcessCalls",
    "engine.lossless": "check_sampling",
    "engine.protocol": "Engine",
    "engine.schedule.channel": "stand_aside",
    "engine.sleep": "PARTS SleepState",
    "engine_class": "keeps_states",
    "errors": "LogprobProvenanceError LosslessError PatchError SpecConfigError SpecPluginError WrongOrderError pass_on",
    "events": "Check DraftRefresh EngineSchedule EngineState HiddenStates RefreshReport RolloutStats Schedule "
    "SelfTestReport TargetInfo",
    "logs": "configure_logging",
    "manager": "create_manager",
    "ranks": "actor_group is_first of_first together",
    "refusals": "Objection load_hf_config refuse unsupported",
    "run_plan": "FindModel Model RunFacts RunPlan split_launch",
    "session": "SpecSession method_of",
    "sources": "folder_of parsed source_of",
    "speculation": "Work",
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
