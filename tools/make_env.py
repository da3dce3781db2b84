"""Create the Python environments of the quickstart and the tests, once: ``python3.11 tools/make_env.py verl openrlhf``.

Standard library only. A second run with the same pins returns at once; ``make`` runs it before everything else.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECTS = (ROOT, ROOT / "testing", ROOT / "projection")  # what is installed from this repository
EDITABLES = "editables==0.5"  # hatchling's, which finds the packages of an editable install
TRAINERS = ("verl", "openrlhf", "trl")
#: megatron and veomni are verl with other actors; the last ones are trainers with other versions of vLLM
ENVIRONMENTS = (
    *TRAINERS,
    "megatron",
    "veomni",
    "verl-vllm0.24",
    "verl-vllm0.26",
    "verl-vllm0.31",
    "openrlhf-vllm0.31",
    "minimal-vllm0.32",
    "trl1.14",
)
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PYTHONS = ((3, 11), (3, 12), (3, 13))


@dataclass(frozen=True)
class Pins:
    """The four kinds of lines in the pins file."""

    normal: tuple[str, ...]
    no_deps: tuple[str, ...]  # installed without what they depend on
    built: tuple[str, ...]  # from source, with the tools that are installed by then; where that fails the rest works
    never: tuple[str, ...]  # left out although others depend on them

    @classmethod
    def parse(cls, text: str) -> Pins:
        """Sort the lines by the tag in their comment: none, ``--no-deps``, ``build`` or ``never``."""
        kinds: dict[str, list[str]] = {"normal": [], "no_deps": [], "built": [], "never": []}
        for line in text.splitlines():
            requirement, _, comment = (part.strip() for part in line.partition("#"))
            if not requirement:
                continue
            tag = comment.split(":")[0].strip()
            kinds[{"--no-deps": "no_deps", "build": "built", "never": "never"}.get(tag, "normal")].append(requirement)
        return cls(*(tuple(lines) for lines in kinds.values()))

    @property
    def torch(self) -> str:
        """The line that pins torch."""
        return next(line for line in self.normal if line.startswith("torch=="))


def pins_file(trainer: str) -> Path:
    """The requirements file of a trainer's environment."""
    return ROOT / "tools" / f"requirements-{trainer}.txt"


def with_included(pins: Path) -> str:
    """A pins file's text, with that of the file that it begins from (``-r NAME``, beside it) in its place.

    A line behind it takes the place of one with the same name.
    """
    lines: list[str] = []
    for line in pins.read_text().splitlines():
        if line.startswith("-r "):
            lines += with_included(pins.parent / line[3:].strip()).splitlines()
            continue
        same = [i for i, before in enumerate(lines) if name_of(line) and name_of(before) == name_of(line)]
        lines = [before for i, before in enumerate(lines) if i not in same] + [line]
    return "\n".join(lines)


def name_of(line: str) -> str:
    """The package that a line is about; nothing for one without."""
    return re.match(r"[\w.-]*", line.strip()).group().lower().replace("_", "-")  # type: ignore[union-attr]


def fail(message: str) -> None:
    """Print one line to stderr and exit with 1."""
    sys.exit(f"make_env: {message}")


def run(*command: str | Path) -> None:
    """Run a command quietly; show its output and stop if it fails."""
    done = subprocess.run([str(c) for c in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        fail(f"this command failed: {shlex.join(map(str, command))}")


def succeeds(*command: str | Path) -> bool:
    """Whether a command exits with 0."""
    return subprocess.run([str(c) for c in command], capture_output=True).returncode == 0


class Installer:
    """Installs into one environment: with uv where uv can be had, else with pip."""

    def __init__(self, python: Path, pins: Pins, scratch: Path) -> None:
        self.python, self.pins = python, pins
        self.pip = (python, "-m", "pip")
        self.uses_uv = succeeds(*self.pip, "install", "-q", "uv")
        self.torch = pins.torch
        self.sources = self._sources()
        self.overrides = scratch / "overrides.txt"
        never = [f'{name}; sys_platform == "never"' for name in pins.never]
        # vLLM's CPU build asks for a CPU build of torch; where none can be had another build serves, too
        another = [self.torch] if self.torch != pins.torch else []
        self.overrides.write_text("".join(f"{line}\n" for line in [*never, *another]))

    def _configured(self, option: str) -> list[str]:
        """Values that pip itself would use for an option, from its environment variable or its files."""
        value = os.environ.get(f"PIP_{option.upper().replace('-', '_')}")
        if value is None:
            command = [str(c) for c in (*self.pip, "config", "get", f"global.{option}")]
            value = subprocess.run(command, text=True, capture_output=True).stdout
        return value.split()

    def _has_torch(self, *options: str) -> bool:
        """Can the pinned torch be had with these options of pip's."""
        pip = (*self.pip, "install", "-q", "--dry-run", "--no-deps", "--ignore-installed")
        return succeeds(*pip, *options, self.torch)

    def _sources(self) -> list[str]:
        """Options that say where packages come from; torch from pip's own find-links if it is there."""
        index: list[str] = []
        if not self._has_torch("--no-index"):
            index = [PYTORCH_CPU_INDEX]
            if not self._has_torch("--index-url", *index):
                self.torch, index = self.torch.removesuffix("+cpu"), []
                print(
                    f"make_env: no CPU build of {self.torch} can be had for this Python: another build of several GB",
                    flush=True,
                )
        if not self.uses_uv:  # pip reads its own configuration
            return [word for url in index for word in ("--extra-index-url", url)]
        options = ["--index-strategy", "unsafe-best-match"]
        options += [o for url in self._configured("find-links") for o in ("--find-links", url)]
        options += [o for url in self._configured("index-url")[:1] for o in ("--default-index", url)]
        return options + [word for url in index for word in ("--index", url)]

    def install(self, *what: str) -> None:
        """Install requirements without ever keeping a package of ``pins.never``."""
        what = tuple(self.torch if line == self.pins.torch else line for line in what)
        if self.uses_uv:
            uv = (self.python, "-m", "uv", "pip", "install", "-q", "--python", self.python)
            run(*uv, *self.sources, "--override", self.overrides, *what)
        else:
            run(*self.pip, "install", "-q", *self.sources, *what)
            run(*self.pip, "uninstall", "-q", "-y", *self.pins.never)

    def builds(self, requirement: str) -> bool:
        """Build and install one requirement from source; False if that fails."""
        command = [*self.pip, "install", "-q", *([] if self.uses_uv else self.sources)]
        command += ["--no-deps", "--no-build-isolation", requirement]
        tools_first = {**os.environ, "PATH": f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        return subprocess.run([str(c) for c in command], capture_output=True, env=tools_first).returncode == 0


def digest(*parts: str | bytes) -> str:
    """A short digest that changes with any part."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part.encode() if isinstance(part, str) else part)
        sha.update(b"\0")
    return sha.hexdigest()


def is_current(stamp: Path, value: str) -> bool:
    """Was the environment made from this value: does its stamp file hold it."""
    return stamp.exists() and stamp.read_text() == value


def create(folder: Path, pins: Pins) -> None:
    """Make the environment anew, in place of what is there."""
    shutil.rmtree(folder, ignore_errors=True)
    if not succeeds(sys.executable, "-m", "venv", folder):
        fail("python -m venv failed; on Debian and Ubuntu: apt install python3-venv")
    with tempfile.TemporaryDirectory() as scratch:
        installer = Installer(folder / "bin" / "python", pins, Path(scratch))
        print(f"make_env: installing with {'uv' if installer.uses_uv else 'pip (uv cannot be had)'}", flush=True)
        installer.install(*pins.normal)
        if pins.no_deps:
            installer.install("--no-deps", *pins.no_deps)
        for requirement in pins.built:
            if not installer.builds(requirement):
                print(
                    f"make_env: {requirement} cannot be built here (it is optional; it needs a C++20 compiler)",
                    flush=True,
                )


def install_project(folder: Path) -> None:
    """Install this repository's distributions, editable; their dependencies are pinned above, but for what that takes."""
    editable = [word for project in PROJECTS for word in ("-e", project)]
    run(folder / "bin" / "python", "-m", "pip", "install", "-q", "--no-deps", EDITABLES, *editable)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and bring the environments up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "trainers", nargs="*", metavar="TRAINER", help=f"any of: {', '.join(ENVIRONMENTS)} (default: verl)"
    )
    parser.add_argument("--folder", type=Path, default=ROOT / ".envs", help="where they go (default: .envs)")
    arguments = parser.parse_args(argv)
    trainers = arguments.trainers or ["verl"]
    if unknown := sorted(set(trainers) - set(ENVIRONMENTS)):
        parser.error(f"unknown trainer {unknown[0]!r}; known: {', '.join(ENVIRONMENTS)}")
    if sys.version_info[:2] not in PYTHONS or not sys.platform.startswith("linux"):
        found = f"{sys.platform} with Python {sys.version_info.major}.{sys.version_info.minor} ({sys.executable})"
        fail(f"needs Linux with Python 3.11, 3.12 or 3.13, found {found}; name one: make PYTHON=/path/to/python3.11 …")
    for trainer in trainers:
        folder = (arguments.folder / trainer).absolute()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f".{trainer}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            bring_up_to_date(folder, pins_file(trainer))


def bring_up_to_date(folder: Path, pins: Path) -> None:
    """Do what is missing; the stamp files say what is there."""
    pins_text = with_included(pins)
    environment = digest(pins_text, Path(__file__).read_text(), sys.version)
    built_from = [project / "pyproject.toml" for project in PROJECTS]
    project = digest(environment, str(ROOT), *(file.read_bytes() for file in built_from))
    start = time.monotonic()
    if not is_current(folder / ".stamp-environment", environment):
        print(f"make_env: creating {folder} (a minute with a warm cache, else the time of a 1 GB download)", flush=True)
        create(folder, Pins.parse(pins_text))
        (folder / ".stamp-environment").write_text(environment)
    if not is_current(folder / ".stamp-project", project):
        install_project(folder)
        (folder / ".stamp-project").write_text(project)
        print(f"make_env: {folder} is ready after {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
