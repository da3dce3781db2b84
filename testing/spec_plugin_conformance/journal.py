"""What the processes of a run saw, as JSON lines in one folder: a file for each process, read back in order of time."""

from __future__ import annotations

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any


class Journal:
    """Writes one line for each event into ``<folder>/<pid>.jsonl``."""

    def __init__(self, folder: Path) -> None:
        """Write into this folder, which may be missing."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.session = uuid.uuid4().hex[:8]  # a process may have more than one
        self._events = 0

    def write(self, hook: str, **what: Any) -> None:
        """One event: its name, and what it holds."""
        line = {"hook": hook, "time": time.time(), "pid": os.getpid(), "session": self.session, "event": self._events}
        self._events += 1
        with (self.folder / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(line | what) + "\n")


def read_trace(folder: Path) -> list[dict[str, Any]]:
    """Every event that any process recorded, by time; a line that a kill cut off is left out."""
    events = []
    for file in sorted(folder.glob("[0-9]*.jsonl")):
        for line in file.read_text().splitlines():
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return sorted(events, key=lambda e: (e["time"], e["event"]))
