"""Runs a script as ``python`` would, with DeepSpeed for a CPU: ``python -m spec_plugin_trl_cpu script.py …``.

DeepSpeed needs its change before TRL's trainer is made, when vLLM loads no plugin yet.
"""

from __future__ import annotations

import os
import runpy
import sys

from spec_plugin_trl_cpu import chosen


def main() -> None:
    """Run the script that the command line names."""
    if chosen():
        from spec_plugin_cpu.deepspeed import collectives_by_gloo

        from spec_plugin_trl_cpu import shims

        collectives_by_gloo(shims.shims)
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
