"""Does what ``pack_card.py`` packed serve: run by its ``--check`` with a Python that has what the machine has.

vLLM and the models of Qwen3, Llama and EAGLE-3 are imported, and the configuration of an engine with the flag is built as on an
H100. There is none: ``stub_driver`` puts a library in the place of the CUDA driver's, and answers in the place of NVML's.
Prints what such an engine runs and which repairs of ours this vLLM takes, and exits with 1 if that is not the V2 model runner
with full graphs, or a repair no longer fits.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CARD, CAPABILITY, MEMORY = "NVIDIA H100 80GB HBM3", (9, 0), 80 * 2**30
#: of the driver's library, what vLLM's extensions are linked with; none is called
DRIVER = ("cuGetProcAddress_v2", "cuPointerGetAttribute", "cuTensorMapEncodeTiled")
MODULES = (
    "vllm",
    "vllm._C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.llama_eagle3",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.sample.rejection_sampler",
    "vllm.v1.engine.async_llm",
    "vllm.entrypoints.openai.api_server",
    "xgrammar",
)
OF_TRAINERS = {
    "trl": ("trl", "datasets", "trl.trainer.grpo_trainer", "spec_plugin_trl"),
    "verl": ("verl", "ray", "tensordict", "hydra", "transfer_queue", "verl.trainer.main_ppo", "spec_plugin_verl"),
}
WANTED = {"runner": "V2", "graphs": "FULL_AND_PIECEWISE"}
NVML = "vllm.third_party.pynvml"
ANSWERS = {
    "nvmlInit": lambda: None,
    "nvmlShutdown": lambda: None,
    "nvmlDeviceGetCount": lambda: 1,
    "nvmlDeviceGetHandleByIndex": lambda index: index,
    "nvmlDeviceGetCudaComputeCapability": lambda handle: CAPABILITY,
    "nvmlDeviceGetName": lambda handle: CARD,
    "nvmlDeviceGetUUID": lambda handle: "GPU-00000000-0000-0000-0000-000000000000",
    "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=MEMORY, free=MEMORY, used=0),
    "nvmlDeviceGetNumaNodeId": lambda handle: 0,
}


class _StubOfNVML(MetaPathFinder):
    """Puts the answers into vLLM's copy of NVML's binding, which it asks while it is imported itself."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """As the import system asks."""
        if fullname != NVML:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Answering(fullname, spec.origin)
        return spec


class _Answering(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        vars(module).update(ANSWERS)


def stub_driver() -> None:
    """An H100 to whoever asks: the one place where this trial differs from a machine with a card."""
    source = "".join(f"int {name}(void) {{ return 100; }}\n" for name in DRIVER)  # 100: no device
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/libcuda.so.1"
        command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-o", library, "-"]
        subprocess.run(command, input=source, text=True, check=True)
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    import torch

    sys.meta_path.insert(0, _StubOfNVML())
    properties: Any = SimpleNamespace(
        name=CARD,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        total_memory=MEMORY,
        multi_processor_count=132,
        is_integrated=0,
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.get_device_capability = lambda device=None: CAPABILITY
    torch.cuda.get_device_name = lambda device=None: CARD


@contextmanager
def a_model() -> Iterator[Path]:
    """A folder with the configuration of a small Qwen3; nothing reads weights."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
        "eos_token_id": 1,
        "bos_token_id": 0,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield Path(folder)


def imported(modules: Sequence[str]) -> list[str]:
    """Import each; what could not be, and why."""
    failed = []
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            failed.append(f"{module}: {type(error).__name__}: {error}")
    print(
        f"card_check: {len(modules) - len(failed)} of {len(modules)} modules imported: {', '.join(modules)}", flush=True
    )
    return failed


def configured(k: int, requests: int) -> dict[str, Any]:
    """What an engine with the flag runs, by vLLM's own configuration of it."""
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform

    from examples.bench.engines import EXTENSION, EngineSettings, describe, engine_options, flag_front
    from spec_plugin.plan.model_runner import A_TRAINED_DRAFT, runner_of

    with a_model() as model:
        given = engine_options(EngineSettings(dtype="bfloat16", max_num_seqs=requests, eager=False))
        front = flag_front(describe(model, "bfloat16", requests, {"temperature": 1.0}), None, k)
        ours = front.engine_arguments(given, EXTENSION)
        arguments = AsyncEngineArgs(model=str(model), **{**given, **ours})
        config = arguments.create_engine_config()
    compilation = config.compilation_config
    return {
        "device": f"{current_platform.get_device_name()}, {current_platform.device_type}",
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "runner, as this project says": runner_of(A_TRAINED_DRAFT, "cuda").words,
        "graphs": compilation.cudagraph_mode.name,
        "capture sizes": compilation.cudagraph_capture_sizes,
        "asynchronous scheduling": config.scheduler_config.async_scheduling,
        "k": config.speculative_config.num_speculative_tokens if config.speculative_config else 0,
    }


def repaired() -> list[str]:
    """Repair this vLLM as an engine with the flag does on a card; what no longer fits, and why."""
    from spec_plugin.api.errors import PatchError
    from spec_plugin.commands.doctor import examine_patches
    from spec_plugin.engine.vllm.repairs import draft_temperature, patches

    found = examine_patches()
    for one in found:
        print(f"card_check: repair {one.name}: {one.detail}", flush=True)
    failed = [f"repair {one.name}: {one.detail}" for one in found if one.state != "ok"]
    try:  # of engines that draw their proposals
        status = patches.apply(draft_temperature.TEMPERATURE_PATCHES[True])
        print(f"card_check: repair {status.name}: {status.state}", flush=True)
    except PatchError as error:
        failed.append(f"repair: {error}")
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    """Import, configure, repair, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, metavar="SITE", help="where the pieces are unpacked")
    parser.add_argument("trainers", nargs="*", metavar="TRAINER", help="archives beside vLLM's")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    asked = parser.parse_args(argv)
    paths = [str(asked.site), str(ROOT), str(ROOT / "adapters")]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # vLLM looks at a model's class in a process of its own
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    stub_driver()
    failed = imported([*MODULES, *(module for name in asked.trainers for module in OF_TRAINERS[name])])
    facts = configured(asked.k, asked.requests)
    for name, value in facts.items():
        print(f"card_check: {name}: {value}")
    failed += [f"{name} is {facts[name]}, not {value}" for name, value in WANTED.items() if facts[name] != value]
    failed += repaired()
    for line in failed:
        print(f"card_check: FAILED: {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
