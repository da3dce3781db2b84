"""Law 1 on real verl and real vLLM: installed, imported and discovered, but without the flag, nothing differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

import pytest

# What a process of a run without the flag does with this package: vLLM loads and calls its general plugins, and at most
# somebody imports the core. Every symbol that the package could change is compared before and after, by identity.
SCRIPT = """
    import importlib, importlib.metadata, json, sys
    import torch.distributed

    from vllm import _custom_ops
    from vllm.model_executor.layers import utils as gemm
    from vllm.utils import cpu_triton_utils
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from verl.plugin.platform import PlatformRegistry
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    def flat(engines):
        return {f"{m}/{b}/{key}": c for m, bs in engines.items() for b, ks in bs.items() for key, c in ks.items()}

    def snapshot():
        return {
            "torch.distributed.init_process_group": torch.distributed.init_process_group,
            "importlib.metadata.version": importlib.metadata.version,
            "verl rollout": base._ROLLOUT_REGISTRY[("vllm", "async")],
            "verl replica": RolloutReplicaRegistry._registry["vllm"],
            "verl platforms": PlatformRegistry.registered_names(),
            "vllm expand_kernel": cpu_triton_utils.expand_kernel.func,
            "vllm rms_norm": _custom_ops.rms_norm,
            "vllm gemm": gemm.dispatch_cpu_unquantized_gemm,
            "vllm EngineCore": tuple(sorted(vars(EngineCore))),
            "vllm Scheduler": tuple(sorted(vars(Scheduler))),
            "verl FSDP engine": tuple(sorted(vars(FSDPEngineWithLMHead))),
        } | flat(EngineRegistry._engines)

    before = snapshot()
    ours = [n for n in sys.modules if n.startswith(("spec_plugin", "draft_training"))]
    for entry_point in importlib.metadata.entry_points(group="vllm.general_plugins"):
        if entry_point.name.startswith("spec_plugin"):
            entry_point.load()()
    ours += [n for n in sys.modules if n.startswith(("spec_plugin.engine", "draft_training")) or n == "spec_plugin_verl"]
    rooms = ("lifecycle.session", "lifecycle.manager", "lifecycle.registry", "commands.cli", "engine.vllm.repairs.on_cpu",
             "engine.vllm.extension", "engine.vllm.schedule.scheduler", "engine.selftest.test", "engine.lossless")
    for module in ("spec_plugin", *(f"spec_plugin.{room}" for room in rooms)):
        importlib.import_module(module)
    after = snapshot()
    changed = [name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)
               and not (isinstance(before.get(name), (str, tuple)) and before[name] == after.get(name))]
    foreign = [name for name, value in after.items()
               if "spec_plugin" in getattr(value, "__module__", "") or "spec_plugin" in str(value)]
    print("RESULT", json.dumps({"changed": changed, "foreign": foreign, "imported": ours}))
"""


def cold_run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **options)


def run(script: str, start: Callable[..., subprocess.CompletedProcess[str]] = cold_run) -> str:
    """The script's output, in a fresh process without verl's CPU switches."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VERL_")}
    done = start("-c", textwrap.dedent(script), env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(not (find_spec("verl") and find_spec("vllm")), reason="needs verl and vLLM")
def test_law_1_installed_and_discovered_without_the_flag_not_one_symbol_or_registry_entry_differs(warm_run):
    (result,) = [line for line in run(SCRIPT, warm_run).splitlines() if line.startswith("RESULT")]
    assert json.loads(result.removeprefix("RESULT")) == {"changed": [], "foreign": [], "imported": []}


def test_law_1_what_vllm_discovers_in_every_process_imports_no_trainer_and_no_torch():
    output = run("""
        import importlib.metadata, sys
        for entry_point in importlib.metadata.entry_points(group="vllm.general_plugins"):
            if entry_point.name.startswith("spec_plugin"):
                entry_point.load()()
        print([m for m in ("torch", "vllm", "verl", "ray", "spec_plugin_verl") if m in sys.modules])
    """)
    assert output.strip() == "[]"


@pytest.mark.skipif(not find_spec("verl"), reason="needs verl")
def test_law_1_verls_cpu_switches_are_not_the_flag(warm_run):
    script = """
        import os, sys
        os.environ.update(VERL_USE_EXTERNAL_MODULES="spec_plugin_verl_cpu", VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda")
        import verl
        from verl.utils.device import get_device_name
        from verl.workers.rollout import base
        print(get_device_name(), base._ROLLOUT_REGISTRY[("vllm", "async")], "spec_plugin_verl" in sys.modules)
    """
    output = run(script, warm_run)
    assert output.splitlines()[-1] == "cpu verl.workers.rollout.vllm_rollout.ServerAdapter False"


def test_law_1_the_core_imports_no_trainer_no_engine_and_no_torch_by_itself():
    output = run("""
        import sys
        import spec_plugin, spec_plugin.commands.cli, spec_plugin.lifecycle.manager
        print([m for m in ("torch", "vllm", "verl", "ray", "spec_plugin_verl") if m in sys.modules])
    """)
    assert output.strip() == "[]"


def test_law_1_nothing_is_published_where_verl_would_load_it_unasked():
    groups = ("verl.plugins", "vllm.platform_plugins", "vllm.io_processor_plugins", "vllm.stat_logger_plugins")
    found = [ep for group in groups for ep in entry_points(group=group)]
    assert not [ep for ep in found if "spec_plugin" in ep.value]
