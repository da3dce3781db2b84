"""Several Ray nodes on one machine, and a program on them: ``python -m spec_plugin_verl_cpu.nodes 2 MODULE [ARGUMENT]…``.

Each node has a raylet, an object store and workers of its own, and one logical GPU. All of it ends with this process.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from ray._private.utils import get_ray_address_file
from ray.cluster_utils import Cluster

#: what each node has; Ray chooses the ports
NODE = {"num_cpus": 16, "num_gpus": 1, "object_store_memory": 500_000_000, "include_dashboard": False}


def main() -> None:
    """Start the nodes, and run the module as a driver on them."""
    count, module, *arguments = sys.argv[1:]
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    # else any other run that starts here would join, or fail to join when we are gone
    Path(get_ray_address_file(None)).unlink(missing_ok=True)
    for _ in range(int(count) - 1):
        cluster.add_node(**NODE)
    print(f"Started a local Ray instance of {count} nodes", flush=True)  # `launch.ray_failed_to_start` reads it
    os.environ["RAY_ADDRESS"] = cluster.address
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
