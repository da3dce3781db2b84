"""What the installed vLLM can do for us, found by looking at it and never by its version; for ``spec-plugin doctor``."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any, get_args

from torch import nn

from spec_plugin.api.diagnosis import Diagnosis, State
from spec_plugin.plan.model_runner import A_TRAINED_DRAFT, leaves_a_draft_unread
from spec_plugin.plan.sources import nothing_collected


def find_draft(worker: Any) -> nn.Module | None:
    """The running draft model of a worker, or None (no speculation, or a method without a model).

    vLLM 0.29 has a public accessor on the worker; 0.24 has none, and keeps the model under ``drafter`` (V1 runner) or
    ``speculator`` (V2 runner), perhaps inside a CUDA graph wrapper.
    """
    model: Any
    if hasattr(worker, "get_draft_model"):
        model = worker.get_draft_model()
    else:
        runner = worker.model_runner
        proposer = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
        model = getattr(proposer, "model", None)
        if hasattr(model, "unwrap"):
            model = model.unwrap()
    return model if isinstance(model, nn.Module) else None


def probe_vllm() -> list[Diagnosis]:
    """Look at the installed vLLM. Takes seconds (it imports vLLM), starts no engine and changes nothing.

    Raises:
        ImportError: if it cannot be imported.
    """
    with nothing_collected():  # vLLM's config parses its own sources as it is imported
        importlib.import_module("vllm")
        return [_looked_at(probe) for probe in (*_REQUIRED, *_OTHERS)]


_USE_ANOTHER = "use a vLLM of the range that spec-plugin declares"
#: name, whether it is there, what was found, and what to do, or what is done instead, where it is missing
Found = tuple[str, bool, str, str]


def _looked_at(probe: Callable[[], Found]) -> Diagnosis:
    missing: State = "fail" if probe in _REQUIRED else "note"
    try:
        name, available, detail, fix = probe()
    except (ImportError, AttributeError) as error:  # a module that moved is an answer too
        name = probe.__name__.removeprefix("_probe_").replace("_", " ")
        return Diagnosis(name, missing, f"{type(error).__name__}: {error}", _USE_ANOTHER)
    return Diagnosis(name, "ok", detail) if available else Diagnosis(name, missing, detail, fix)


def _probe_platform() -> Found:
    from vllm.platforms import current_platform

    kind = current_platform.device_type
    fix = "only cpu and cuda have been tried"
    return "platform", kind in ("cpu", "cuda"), f"device type {kind}", fix


def _probe_dynamic_schedule() -> Found:
    from vllm.v1.core.sched.scheduler import Scheduler

    option = "num_speculative_tokens_per_batch_size" in speculative_fields()
    lookup = "dynamic_sd_lookup" in inspect.getsource(Scheduler)
    detail = (
        f"option {'present' if option else 'missing'}, scheduler.dynamic_sd_lookup {'present' if lookup else 'missing'}"
    )
    return "dynamic schedule", option and lookup, detail, "k cannot change at run time: set spec.serve=always"


def _probe_scheduler_factory() -> Found:
    from vllm.config import SchedulerConfig

    source = inspect.getsource(SchedulerConfig.get_scheduler_cls)
    ok = "resolve_obj_by_qualname" in source
    detail = "scheduler_cls may name any callable" if ok else "scheduler_cls is resolved in an unknown way"
    return "scheduler factory", ok, detail, "no control channel into the engine: set spec.serve=always"


def _probe_draft_load_config() -> Found:
    from vllm.platforms import current_platform

    if "draft_load_config" not in speculative_fields():
        fix = "with load_format=dummy the draft starts random: refresh it before the first rollout"
        return "draft load config", False, "SpeculativeConfig.draft_load_config", fix
    if leaves_a_draft_unread("dummy", A_TRAINED_DRAFT, current_platform.device_type):
        detail = "SpeculativeConfig.draft_load_config, which the V2 model runner does not read"
        fix = (
            "a draft with a pruned vocabulary, and a frozen one, need load_format=auto, verl's own is dummy, or "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )
        return "draft load config", False, detail, fix
    return "draft load config", True, "SpeculativeConfig.draft_load_config", ""


def _probe_rejection_methods() -> Found:
    found = get_args(speculative_fields().get("rejection_sample_method"))
    exact = [m for m in ("standard", "block") if m in found]
    return "rejection methods", "standard" in exact, f"exact: {exact}; all: {list(found)}", _USE_ANOTHER


def _probe_utility_calls() -> Found:
    from vllm.v1.engine.core_client import AsyncMPClient

    ok = hasattr(AsyncMPClient, "call_utility_async")
    return "utility calls", ok, "AsyncMPClient.call_utility_async", "set spec.serve=always"


def _probe_sleep_mode() -> Found:
    from vllm.platforms import current_platform

    ok = bool(current_platform.is_sleep_mode_available())
    detail = "level 2 drops the draft: it is refreshed after every wake-up" if ok else "this platform has none"
    return "sleep mode", ok, detail, "not needed"


#: what the adapters set unconditionally; everything else has a fallback, which its last field describes
_REQUIRED = (_probe_dynamic_schedule, _probe_scheduler_factory, _probe_rejection_methods, _probe_utility_calls)
_OTHERS = (_probe_platform, _probe_draft_load_config, _probe_sleep_mode)


def speculative_fields() -> dict[str, Any]:
    """Every field of the installed SpeculativeConfig with its resolved type annotation."""
    from vllm.config import speculative

    hints = {f.name: f.type for f in dataclasses.fields(speculative.SpeculativeConfig)}
    return {n: vars(speculative).get(t, t) if isinstance(t, str) else t for n, t in hints.items()}
