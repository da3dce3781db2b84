"""``ray job submit`` on one machine: ``python -m spec_plugin_openrlhf_cpu.job MODULE <flags…>`` submits, and shows the log.

The cluster is one of its own, with logical GPUs and the dashboard that takes jobs, and ends with this process.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path

from ray._private.utils import get_ray_address_file
from ray.cluster_utils import Cluster
from ray.job_submission import JobStatus, JobSubmissionClient

from spec_plugin_openrlhf_cpu.__main__ import RAY


async def _show(client: JobSubmissionClient, job: str) -> None:
    async for text in client.tail_job_logs(job):
        print(text, end="", flush=True)


def main() -> None:
    """Start the cluster, submit the run, and end as it ends."""
    cluster = Cluster(initialize_head=True, head_node_args={**RAY, "include_dashboard": True, "dashboard_port": 0})
    # else any other run that starts here would join, or fail to join when we are gone
    Path(get_ray_address_file(None)).unlink(missing_ok=True)
    print("Started a local Ray instance that takes jobs", flush=True)  # `launch.ray_failed_to_start` reads it
    client = JobSubmissionClient(f"http://{cluster.webui_url}")
    command = shlex.join([sys.executable, "-m", "spec_plugin_openrlhf_cpu", *sys.argv[1:]])
    job = client.submit_job(entrypoint=command)
    asyncio.run(_show(client, job))
    status = client.get_job_info(job)
    sys.exit(0 if status.status == JobStatus.SUCCEEDED else f"the job {status.status.value}: {status.message}")


if __name__ == "__main__":
    main()
