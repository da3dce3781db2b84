"""``python -m spec_plugin_openrlhf_cpu MODULE <flags…>``: run a module of OpenRLHF on this CPU, its flags untouched."""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

from spec_plugin.api.errors import SpecConfigError
from spec_plugin_openrlhf_cpu import chosen, setup_worker, shims

START_ATTEMPTS = 4
#: for Ray to bring what its workers printed last, on a loaded machine: the last step of a run is among it
LAST_LINES_S = 3.0
RAY = {
    "num_cpus": 8,  # in Ray's books only
    "num_gpus": 4,  # the same: actor, reference model, engine, one spare
    "include_dashboard": False,
    "object_store_memory": 500_000_000,
}


def main() -> None:
    """Install the shims, in Ray's workers too, and run the module as ``__main__``.

    Raises:
        SpecConfigError: if no module is named, or the CPU is not chosen.
    """
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SpecConfigError(
            "no module named; usage: python -m spec_plugin_openrlhf_cpu openrlhf.cli.train_ppo_ray <flags…>"
        )
    if not chosen():
        raise SpecConfigError(
            "spec_plugin_openrlhf_cpu runs with DS_ACCELERATOR=cpu and without a visible GPU only: set DS_ACCELERATOR=cpu and "
            "CUDA_VISIBLE_DEVICES= or run OpenRLHF itself"
        )
    # OpenRLHF switches this on; without a copy to a GPU, workers would write into tensors that they share
    os.environ.setdefault("RAY_ENABLE_ZERO_COPY_TORCH_TENSORS", "0")
    setup_worker()
    shims.replace("ray", "init", patient_init)
    module, sys.argv[:] = sys.argv[1], sys.argv[1:]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        time.sleep(LAST_LINES_S)
        ray.shutdown()


def patient_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """``ray.init`` with logical GPUs and our hook; on a loaded machine its daemons miss their limit, so it is tried again."""

    def init(*args: Any, runtime_env: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        theirs = runtime_env or {}
        variables = {"DS_ACCELERATOR": os.environ["DS_ACCELERATOR"], **theirs.get("env_vars", {})}
        resources = {} if "RAY_ADDRESS" in os.environ else RAY  # a cluster that runs already has its own
        ours = {"worker_process_setup_hook": "spec_plugin_openrlhf_cpu.setup_worker", "env_vars": variables}
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                return original(*args, runtime_env={**theirs, **ours}, **{**resources, **kwargs})
            except Exception as error:
                ray.shutdown()
                if attempt == START_ATTEMPTS:
                    raise
                print(f"Ray did not start ({type(error).__name__}: {error}); trying again", flush=True)
                time.sleep(3)

    return init


if __name__ == "__main__":
    main()
