"""The second node of a vLLM engine across two: its worker alone, as `vllm serve --headless` starts it. Argument: its options.

That command itself asks for the version of a distribution called ``vllm``, which the CPU build's is not.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Serve until the first node ends."""
    from vllm import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    config = EngineArgs(**json.loads(sys.argv[1])).create_engine_config(headless=True)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)


if __name__ == "__main__":  # its worker imports this module again
    main()
