"""The door: everything that an adapter imports of spec-plugin, and the one module that it imports.

The actor's side: ``SpecRun``, with a link to the engines. The engine's side: ``EngineFront`` in the process that owns vLLM's
``AsyncLLM``, ``SpecWorkerExtension`` inside its workers. How to write an adapter: ``examples/minimal_adapter``.

A name is imported when it is first asked for: an actor loads no vLLM for this module, and a check of options no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from draft_training.parsing import lazily

if TYPE_CHECKING:
    from spec_plugin.actor.control import RolloutControl
    from spec_plugin.actor.decoder import find_decoder, shared_with_draft, text_sizes
    from spec_plugin.actor.harvest import (
        DecoderHarvest,
        Documents,
        PackedShards,
        Piece,
        RolloutHarvest,
        Rows,
        padded_rows,
        response_at_the_end,
        responses_at_the_end,
    )
    from spec_plugin.actor.judged import chosen_to_recompute
    from spec_plugin.actor.links import ActorsLink, EngineLink, LocalLink, merge_stats
    from spec_plugin.actor.rank_engines import RanksLink, random_streams_kept
    from spec_plugin.actor.run import Responses, SpecRun
    from spec_plugin.actor.taps import LAST, Taps
    from spec_plugin.arguments import ENABLE, PREFIX, help_text, read_config, split_arguments
    from spec_plugin.blocking import callers_stream, run_blocking
    from spec_plugin.config import NAME, SpecConfig, meant_for_us
    from spec_plugin.diagnosis import AdapterDoctor, Diagnosis, look_up, switch_to_cpu, version_of
    from spec_plugin.engine.calls import EngineCalls, SpecEngineMethods
    from spec_plugin.engine.configuration import configuration, planned_configuration
    from spec_plugin.engine.extension import SpecWorkerExtension
    from spec_plugin.engine.front import EngineFront
    from spec_plugin.engine.inprocess import InProcessCalls
    from spec_plugin.engine.lossless import check_sampling
    from spec_plugin.engine.protocol import Engine
    from spec_plugin.engine.schedule.channel import stand_aside
    from spec_plugin.engine.sleep import PARTS, SleepState
    from spec_plugin.engine_class import keeps_states
    from spec_plugin.errors import (
        LogprobProvenanceError,
        LosslessError,
        PatchError,
        SpecConfigError,
        SpecPluginError,
        WrongOrderError,
        pass_on,
    )
    from spec_plugin.events import (
        Check,
        DraftRefresh,
        EngineSchedule,
        EngineState,
        HiddenStates,
        RefreshReport,
        RolloutStats,
        Schedule,
        SelfTestReport,
        TargetInfo,
    )
    from spec_plugin.logs import configure_logging
    from spec_plugin.manager import create_manager
    from spec_plugin.outside import text_of
    from spec_plugin.ranks import actor_group, is_first, of_first, together
    from spec_plugin.refusals import Objection, load_hf_config, refuse, truncated_in_loss, unsupported, wrong_option
    from spec_plugin.run_plan import FindModel, Model, RunFacts, RunPlan, refuse_script, split_launch
    from spec_plugin.session import SpecSession, method_of
    from spec_plugin.sources import folder_of, parsed, source_of
    from spec_plugin.speculation import Reason

if not TYPE_CHECKING:  # mypy sees the imports above, and so a name that is not there
    __all__, __getattr__ = lazily(__name__, __file__)

    def __dir__() -> list[str]:
        return __all__
