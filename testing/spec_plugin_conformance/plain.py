"""A run without the flag under the kit's eyes: a plugin of vLLM that records engines and requests; inert but in that run.

Law 1 stays what it is: the run in which nothing of ours may be loaded is another one.
"""

from __future__ import annotations

import os
from pathlib import Path

#: names the folder of the records, in the environment of that run
FOLDER = "SPEC_PLUGIN_CONFORMANCE_PLAIN"
_watching: list[str] = []


def watch() -> None:
    """Entry point of ``vllm.general_plugins``, which vLLM calls in each of its processes, some of them more than once."""
    folder = os.environ.get(FOLDER)
    if not folder or folder in _watching:
        return
    _watching.append(folder)
    from spec_plugin_conformance.journal import Journal
    from spec_plugin_conformance.plants import PlantedErrors
    from spec_plugin_conformance.watch import watch_requests

    watch_requests(PlantedErrors(Path(folder)), Journal(Path(folder)).write, {})
