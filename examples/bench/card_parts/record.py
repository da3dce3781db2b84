"""The JSON of one part: written whole after every row, so that a part that is ended loses nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.bench import common

REHEARSAL = "a rehearsal on a CPU with a tiny model: it shows that the script runs, and is no claim about any GPU"


class Record:
    """Rows and notes of one part, in a file."""

    def __init__(self, file: Path, content: dict[str, Any]) -> None:
        """Take what the file holds; see :func:`begin` and :func:`resume`."""
        self.file, self.content = file, content
        self._deadline = float("inf")

    @property
    def settings(self) -> dict[str, Any]:
        """Options of the run."""
        settings: dict[str, Any] = self.content["settings"]
        return settings

    def limit(self, seconds: float) -> None:
        """From now on ``left`` counts down."""
        self._deadline = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds in which new rows may be begun."""
        return self._deadline - time.monotonic()

    def enough_for(self, seconds: float, what: str) -> bool:
        """Is there time for ``what``; if not, that is noted."""
        if self.left() >= seconds:
            return True
        self.note(f"left out for want of time: {what}")
        return False

    def row(self, **values: Any) -> None:
        """Add a row, and save."""
        self.content["rows"].append(values)
        self.save()
        common.say(", ".join(f"{name}={_short(v)}" for name, v in values.items() if not isinstance(v, dict | list)))

    def note(self, text: str) -> None:
        """Add a remark, and save."""
        self.content["notes"].append(text)
        self.save()
        common.say(text)

    def finish(self, status: str, why: str = "") -> None:
        """Say how the part ended."""
        self.content.update(status=status, why=why)
        self.save()

    def save(self) -> None:
        """Write all of it to a new file, which then takes the place of the old one."""
        partial = self.file.with_suffix(".partial")
        text = json.dumps(self.content, indent=1, default=common.plain)
        with partial.open("w") as stream:
            stream.write(text + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, self.file)


def begin(file: Path, part: str, settings: Mapping[str, Any], where: Mapping[str, Any]) -> Record:
    """An empty record in a new file.

    Args:
        file: of the part; an old one is replaced.
        part: its name.
        settings: options of the run.
        where: from :func:`machine`.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    claim = {} if where["card"] else {"claim": REHEARSAL}
    record = Record(file, {"part": part, **claim, "status": "running", "why": "", "environment": dict(where)})
    record.content |= {"settings": dict(settings), "notes": [], "rows": []}
    record.save()
    return record


def resume(file: Path) -> Record:
    """The record in a file.

    Raises:
        ValueError: if there is none, or it is not one.
    """
    try:
        content = json.loads(file.read_text())
        content["settings"], content["rows"], content["notes"], content["status"], content["part"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} holds no record of a part ({type(error).__name__}: {error}); run the part anew"
        ) from None
    return Record(file, content)


def machine(commit: str | None = None) -> dict[str, Any]:
    """Card, driver, versions, date and commit, without touching the card.

    Args:
        commit: where the sources are no git repository.
    """
    where = common.environment("cpu")
    card, driver, memory = card_of(_nvidia_smi())
    where.update(device=card or "cpu", card=card, driver=driver, card_memory=memory)
    where["commit"] = commit or where["commit"]
    return where


def card_of(line: str | None) -> tuple[str | None, str | None, str | None]:
    """Name, driver and memory from a line of nvidia-smi; None for each where there is no card."""
    fields = [field.strip() for field in (line or "").split(",")]
    return (fields[0], fields[1], fields[2]) if len(fields) == 3 else (None, None, None)


def _nvidia_smi() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None


def _short(value: Any) -> str:
    if isinstance(value, common.Spread):
        return value.text(".4g")
    return f"{value:.4g}" if isinstance(value, float) else str(value)
