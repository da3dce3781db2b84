"""``python -m spec_plugin_openrlhf_cpu MODULE <flags…>``: run a module of OpenRLHF on this CPU, its flags untouched."""

from __future__ import annotations

import os
import runpy
import sys
import time
from typing import Any

import ray

from spec_plugin.errors import SpecConfigError
from spec_plugin_openrlhf_cpu import chosen, setup_worker

LOGICAL_GPUS = 4  # in Ray's books only: actor, reference model, engine, one spare
START_ATTEMPTS = 4


def main() -> None:
    """Install the shims, start Ray (OpenRLHF keeps one that runs), and run the module as ``__main__``.

    Raises:
        SpecConfigError: if no module is named, or the CPU is not chosen.
    """
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SpecConfigError("usage: python -m spec_plugin_openrlhf_cpu openrlhf.cli.train_ppo_ray <flags…>")
    if not chosen():
        raise SpecConfigError("spec_plugin_openrlhf_cpu needs DS_ACCELERATOR=cpu and a machine without a GPU")
    setup_worker()
    start_ray()
    module = sys.argv[1]
    sys.argv = [module, *sys.argv[2:]]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        ray.shutdown()


def start_ray() -> None:
    """Start Ray with logical GPUs; on a loaded machine its daemons can miss their limit, so it is tried again."""
    settings: dict[str, Any] = {
        "num_cpus": 8,
        "num_gpus": LOGICAL_GPUS,
        "include_dashboard": False,
        "object_store_memory": 500_000_000,
        "runtime_env": {
            "worker_process_setup_hook": "spec_plugin_openrlhf_cpu.setup_worker",
            "env_vars": {"DS_ACCELERATOR": os.environ["DS_ACCELERATOR"]},
        },
    }
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            ray.init(**settings)
            return
        except Exception as error:
            ray.shutdown()
            if attempt == START_ATTEMPTS:
                raise
            print(f"Ray did not start ({type(error).__name__}: {error}); trying again", flush=True)
            time.sleep(3)


if __name__ == "__main__":
    main()
