"""The door: everything that an adapter imports of spec-plugin, and the one module that it imports.

The actor's side: ``SpecRun``, with a link to the engines. The engine's side: ``EngineFront`` in the process that owns vLLM's
``AsyncLLM``, ``SpecWorkerExtension`` inside its workers. How to write an adapter: ``examples/minimal_adapter``.

A name is imported when it is first asked for: an actor loads no vLLM for this module, and a check of options no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from draft_training.parsing import lazily

if TYPE_CHECKING:
    from spec_plugin.api.config import NAME, SpecConfig, meant_for_us
    from spec_plugin.api.diagnosis import AdapterDoctor, Diagnosis, look_up, switch_to_cpu, version_of
    from spec_plugin.api.errors import (
        LogprobProvenanceError,
        LosslessError,
        PatchError,
        SpecConfigError,
        SpecPluginError,
        WrongOrderError,
        pass_on,
    )
    from spec_plugin.api.events import (
        Check,
        DraftRefresh,
        EngineSchedule,
        EngineState,
        HiddenStates,
        RefreshReport,
        RolloutStats,
        Schedule,
        SelfTestPart,
        SelfTestReport,
        TargetInfo,
    )
    from spec_plugin.api.ranks import actor_group, is_first, of_first, together
    from spec_plugin.api.speculation import Reason
    from spec_plugin.engine.calls import EngineCalls, SpecEngineMethods
    from spec_plugin.engine.front import EngineFront
    from spec_plugin.engine.inprocess import InProcessCalls
    from spec_plugin.engine.lossless import check_sampling
    from spec_plugin.engine.protocol import Engine
    from spec_plugin.engine.sleep import PARTS, SleepState
    from spec_plugin.engine.vllm.configuration import configuration, planned_configuration
    from spec_plugin.engine.vllm.extension import SpecWorkerExtension
    from spec_plugin.engine.vllm.schedule.channel import stand_aside
    from spec_plugin.lifecycle.blocking import callers_stream, run_blocking
    from spec_plugin.lifecycle.manager import create_manager, method_of
    from spec_plugin.lifecycle.session import SpecSession
    from spec_plugin.plan.arguments import ENABLE, PREFIX, help_text, is_on, read_config, split_arguments
    from spec_plugin.plan.engine_class import keeps_states
    from spec_plugin.plan.logs import configure_logging
    from spec_plugin.plan.refusals import (
        Objection,
        load_hf_config,
        refuse,
        truncated_in_loss,
        unsupported,
        wrong_option,
    )
    from spec_plugin.plan.run_plan import FindModel, Model, RunFacts, RunPlan, refuse_script, split_launch
    from spec_plugin.plan.sources import folder_of, source_of
    from spec_plugin.plan.text_files import text_of
    from spec_plugin.trainer.decoder import find_decoder, shared_with_draft, text_sizes
    from spec_plugin.trainer.harvest import (
        DecoderHarvest,
        Documents,
        PackedShards,
        RolloutHarvest,
        Rows,
        packed,
        padded_rows,
        response_at_the_end,
        responses_at_the_end,
    )
    from spec_plugin.trainer.harvest_plan import Piece
    from spec_plugin.trainer.judged import chosen_to_recompute
    from spec_plugin.trainer.links import ActorsLink, EngineLink, LocalLink, merge_stats
    from spec_plugin.trainer.log_probs import Responses
    from spec_plugin.trainer.rank_engines import RanksLink, random_streams_kept
    from spec_plugin.trainer.spec_run import SpecRun
    from spec_plugin.trainer.taps import LAST, Taps

if not TYPE_CHECKING:  # mypy sees the imports above, and so a name that is not there
    __all__, __getattr__ = lazily(__name__, __file__)

    def __dir__() -> list[str]:
        return __all__
