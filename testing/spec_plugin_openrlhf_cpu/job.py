"""``ray job submit`` on one machine: ``python -m spec_plugin_openrlhf_cpu.job MODULE <flags…>`` submits, and shows the log.

The cluster is one of its own, with logical GPUs and the dashboard that takes jobs, and ends with this process.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from pathlib import Path

from ray._private.utils import get_ray_address_file
from ray.cluster_utils import Cluster
from ray.job_submission import JobStatus, JobSubmissionClient
from spec_plugin_conformance.launch import free_port

from spec_plugin_openrlhf_cpu.__main__ import RAY

#: what Ray answers until its agent is there, and how long it may take to come
NO_AGENT, AGENT_S = "No available agent to submit job", 60.0


async def _show(client: JobSubmissionClient, job: str) -> None:
    async for text in client.tail_job_logs(job):
        print(text, end="", flush=True)


def _submitted(client: JobSubmissionClient, command: str) -> str:
    """The job's name; the cluster's agent, which takes jobs, may come up long after the dashboard on a loaded machine."""
    until = time.monotonic() + AGENT_S
    while True:
        try:
            return str(client.submit_job(entrypoint=command))
        except RuntimeError as error:
            if NO_AGENT not in str(error) or time.monotonic() > until:
                raise
        time.sleep(1.0)


def main() -> None:
    """Start the cluster, submit the run, and end as it ends."""
    # Ray's agent, which takes the jobs, does without its server where another cluster of this machine has the usual port
    ports = {"dashboard_port": 0, "dashboard_agent_listen_port": free_port()}
    cluster = Cluster(initialize_head=True, head_node_args={**RAY, "include_dashboard": True, **ports})
    # else any other run that starts here would join, or fail to join when we are gone
    Path(get_ray_address_file(None)).unlink(missing_ok=True)
    print("Started a local Ray instance that takes jobs", flush=True)  # `launch.ray_failed_to_start` reads it
    client = JobSubmissionClient(f"http://{cluster.webui_url}")
    command = shlex.join([sys.executable, "-m", "spec_plugin_openrlhf_cpu", *sys.argv[1:]])
    job = _submitted(client, command)
    asyncio.run(_show(client, job))
    status = client.get_job_info(job)
    sys.exit(0 if status.status == JobStatus.SUCCEEDED else f"the job {status.status.value}: {status.message}")


if __name__ == "__main__":
    main()
