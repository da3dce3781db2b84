"""Which wheels a machine without a network lacks for a set of requirements, and where they come from: for ``pack_card.py``.

pip judges markers by the Python that runs it, not by the one that it downloads for; here they are judged by the target's.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

#: CPython 3.12 on x86-64, with the glibc of Ubuntu 24.04
TARGET = {
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "platform_release": "",
    "platform_version": "",
    "implementation_name": "cpython",
    "implementation_version": "3.12.3",
    "platform_python_implementation": "CPython",
    "os_name": "posix",
}
NEWEST_GLIBC = 39
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(NEWEST_GLIBC, 4, -1)),
    *(f"manylinux{year}_x86_64" for year in ("2014", "2010", "1")),
    "linux_x86_64",
)
_ROUNDS = 12  # in which specifiers only grow; three have been enough


class CannotPack(Exception):
    """What was asked for cannot be packed; says what to change."""


@dataclass(frozen=True)
class Wheel:
    """One distribution, chosen."""

    name: str  # canonical
    version: Version
    path: Path
    requires: tuple[Requirement, ...]  # with their markers

    @classmethod
    def at(cls, path: Path) -> Wheel:
        """Read its name and its needs."""
        name, version, _, _ = parse_wheel_filename(path.name)
        with zipfile.ZipFile(path) as archive:
            (member,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA") and n.count("/") == 1)
            fields = HeaderParser().parsestr(archive.read(member).decode())
        return cls(name, version, path, tuple(Requirement(line) for line in fields.get_all("Requires-Dist", [])))


#: a wheel for a name and what is asked of its version
Find = Callable[[str, SpecifierSet], Wheel]


@dataclass
class Wanted:
    """What is asked of one distribution, by whom."""

    specifier: SpecifierSet = field(default_factory=SpecifierSet)
    extras: set[str] = field(default_factory=set)
    asked_by: set[str] = field(default_factory=set)


def applies(requirement: Requirement, extras: Iterable[str] = ()) -> bool:
    """Does a requirement count on the target, with these extras of who asks."""
    if requirement.marker is None:
        return True
    return any(requirement.marker.evaluate({**TARGET, "extra": extra}) for extra in (*extras, ""))


def names_in(text: str) -> dict[str, Version | None]:
    """The distributions that a machine has: names, with ``==VERSION`` where it is known.

    Args:
        text: of a file; names separated by commas or white space, as ``pip freeze`` prints them among others; ``#`` comments.

    Raises:
        CannotPack: naming the entry that is neither.
    """
    found: dict[str, Version | None] = {}
    for line in text.splitlines():
        for word in line.split("#")[0].replace(",", " ").split():
            name, _, version = word.partition("==")
            try:
                found[canonicalize_name(name, validate=True)] = Version(version) if version else None
            except ValueError as error:
                raise CannotPack(
                    f"{word!r} in the list of what the machine has: give NAME or NAME==VERSION (pip list --format=freeze)"
                ) from error
    return found


def lacking(
    roots: Sequence[Requirement],
    find: Find,
    have: Mapping[str, Version | None],
    never: Iterable[str] = (),
    pins: Mapping[str, str] | None = None,
) -> dict[str, Wheel]:
    """Everything that these requirements need and the machine lacks, by canonical name.

    A version is looked for with all that anyone asks of it; where a later one asks for more, all is done again.

    Args:
        roots: what is asked for.
        find: gives a wheel.
        have: what the machine has; a version that is known and does not serve is carried.
        never: canonical names that are left out.
        pins: further specifiers by canonical name.

    Raises:
        CannotPack: from ``find``, or if versions go on changing.
    """
    never = set(never)
    asked: dict[str, SpecifierSet] = {canonicalize_name(name): SpecifierSet(pin) for name, pin in (pins or {}).items()}
    for _ in range(_ROUNDS):
        chosen, wanted = _closure(roots, find, have, never, asked)
        late = {
            n: w.specifier for n, w in wanted.items() if n in chosen and chosen[n].version not in _open(w.specifier)
        }
        if not late:
            return chosen
        for name, specifier in late.items():
            asked[name] = asked.get(name, SpecifierSet()) & specifier
    raise CannotPack(f"no versions that go together were found; still changing: {', '.join(sorted(late))}; pin one")


def _closure(
    roots: Sequence[Requirement],
    find: Find,
    have: Mapping[str, Version | None],
    never: set[str],
    asked: Mapping[str, SpecifierSet],
) -> tuple[dict[str, Wheel], dict[str, Wanted]]:
    """One walk over all needs: what was chosen for each, and what all ask of it."""
    chosen: dict[str, Wheel] = {}
    wanted: dict[str, Wanted] = {}
    todo = [("", requirement) for requirement in roots]
    while todo:
        by, requirement = todo.pop(0)
        name = canonicalize_name(requirement.name)
        if name in never:
            continue
        want = wanted.setdefault(name, Wanted())
        want.specifier &= requirement.specifier
        want.asked_by.add(by)
        new = requirement.extras - want.extras
        want.extras |= new
        if name not in chosen:
            if _serves(have.get(name), name in have, want.specifier):
                continue
            chosen[name] = find(name, want.specifier & asked.get(name, SpecifierSet()))
            new = want.extras | {""}
        todo += [(name, r) for r in chosen[name].requires if applies(r, new)] if new else []
    return chosen, wanted


def _serves(version: Version | None, there: bool, specifier: SpecifierSet) -> bool:
    return there and (version is None or version in _open(specifier))


def _open(specifier: SpecifierSet) -> SpecifierSet:
    """The same, pre-releases among it: what is there is there."""
    return SpecifierSet(str(specifier), prereleases=True)


def _name(path: Path) -> str:
    return parse_wheel_filename(path.name)[0]


class Shelf:
    """Wheels for the target in a folder, downloaded when they are asked for the first time."""

    def __init__(self, folder: Path, said: Callable[[str], None] = print) -> None:
        self._folder, self._said = folder, said
        folder.mkdir(parents=True, exist_ok=True)

    def find(self, name: str, specifier: SpecifierSet) -> Wheel:
        """The newest wheel in the folder that serves, else the newest that the package index has.

        Raises:
            CannotPack: if there is none.
        """
        there = {parse_wheel_filename(path.name)[1]: path for path in self._folder.glob("*.whl") if _name(path) == name}
        # pre-releases where there is nothing else, as pip has it
        if serving := list(specifier.filter(there)):
            return Wheel.at(there[max(serving)])
        before = set(self._folder.glob("*.whl"))
        said = self._download(f"{name}{specifier}")
        new = set(self._folder.glob("*.whl")) - before
        if not new:
            raise CannotPack(f"no wheel of {name}{specifier} for CPython 3.12 on x86-64 could be had; pip says: {said}")
        (path,) = new
        self._said(f"downloaded {path.name}, {path.stat().st_size / 2**20:.1f} MiB")
        return Wheel.at(path)

    def _download(self, requirement: str) -> str:
        """Into the folder; a source distribution is made a wheel where that has no compiled code. Returns pip's last words."""
        pip = [sys.executable, "-m", "pip"]
        target = ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
        target += [f"--platform={platform}" for platform in PLATFORMS]
        command = [*pip, "download", "-q", "--no-deps", *target, "-d", str(self._folder), requirement]
        done = subprocess.run(command, text=True, capture_output=True)
        if done.returncode == 0:
            return ""
        command = [*pip, "wheel", "-q", "--no-deps", "--no-binary=:all:", "-w", str(self._folder), requirement]
        subprocess.run(command, text=True, capture_output=True)
        for path in self._folder.glob("*-linux_x86_64.whl"):  # of the Python that runs here, which is no use there
            path.unlink()
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        return errors[0] if errors else done.stderr[-300:]


def parsed(requirements: Iterable[str]) -> list[Requirement]:
    """As objects.

    Raises:
        CannotPack: naming one that is none.
    """
    found = []
    for text in requirements:
        try:
            found.append(Requirement(text))
        except InvalidRequirement as error:
            raise CannotPack(f"{text!r} is no requirement: give NAME or NAME==VERSION") from error
    return found
