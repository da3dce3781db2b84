"""Archives in pieces that can be carried, a manifest, and the script that puts them together: for ``pack_card.py``."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

MIB = 2**20
MANIFEST, SCRIPT = "manifest.json", "unpack.sh"
#: jumps made absolute first (BCJ): machine code becomes smaller; blocks, which several cores unpack
_XZ = "xz -T0 --x86 --lzma2=preset=6"


@dataclass(frozen=True)
class Piece:
    """A part of an archive."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Archive:
    """Distributions that go into the same folder, in pieces."""

    name: str
    versions: Mapping[str, str]
    pieces: tuple[Piece, ...]
    unpacked: int  # bytes


class Broken(Exception):
    """Pieces are not what the manifest says; says which and what to do."""


def pack(site: Path, name: str, versions: Mapping[str, str], out: Path, limit: int) -> Archive:
    """Compress a folder and cut it.

    Args:
        site: what is in the archive.
        name: of the archive; pieces are called after it.
        versions: of the distributions in it.
        out: where pieces go; older ones of this archive are removed.
        limit: bytes of a piece.
    """
    for old in out.glob(f"{name}.*.piece"):
        old.unlink()
    # the same bytes from the same wheels
    tar = ["tar", "-C", str(site), "--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner"]
    with subprocess.Popen([*tar, "-I", _XZ, "-cf", "-", "."], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pieces: list[Piece] = []
        while data := process.stdout.read(limit):
            path = out / f"{name}.{len(pieces):02d}.piece"
            path.write_bytes(data)
            pieces.append(Piece(path.name, len(data), hashlib.sha256(data).hexdigest()))
    if process.returncode:
        raise Broken(f"tar could not make the archive {name}: it needs GNU tar and xz")
    unpacked = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    return Archive(name, dict(sorted(versions.items())), tuple(pieces), unpacked)


def write_manifest(out: Path, archives: Sequence[Archive], facts: Mapping[str, str]) -> None:
    """The manifest, and beside it the script that checks and unpacks; both are needed on the other side."""
    content = {**facts, "archives": [asdict(archive) for archive in archives]}
    (out / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")
    (out / SCRIPT).write_text(script(archives))


def read_manifest(out: Path) -> list[Archive]:
    """What ``write_manifest`` wrote.

    Raises:
        Broken: if there is none.
    """
    path = out / MANIFEST
    if not path.is_file():
        raise Broken(f"{out} has no {MANIFEST}: name the folder into which pack_card.py wrote")
    found = json.loads(path.read_text())["archives"]
    return [Archive(**{**a, "pieces": tuple(Piece(**p) for p in a["pieces"])}) for a in found]


def verify(out: Path, archives: Sequence[Archive]) -> None:
    """All pieces are there and are what was written.

    Raises:
        Broken: naming each that is not.
    """
    wrong = []
    for piece in (p for archive in archives for p in archive.pieces):
        path = out / piece.name
        if not path.is_file():
            wrong.append(f"{piece.name} is missing")
        elif hashlib.sha256(path.read_bytes()).hexdigest() != piece.sha256:
            wrong.append(f"{piece.name} is broken")
    if wrong:
        raise Broken(f"{', '.join(wrong)}: copy again what is said, or run pack_card.py once more")


def unpack(out: Path, site: Path, archives: Sequence[str] = ()) -> None:
    """Run the script that travels with the pieces.

    Args:
        out: where they are.
        site: where to.
        archives: their names; nothing: all.

    Raises:
        Broken: with what it said.
    """
    done = subprocess.run(["sh", str(out / SCRIPT), str(site), *archives], text=True, capture_output=True)
    if done.returncode:
        raise Broken((done.stdout + done.stderr).strip())


def script(archives: Sequence[Archive]) -> str:
    """A shell script that needs sha256sum, tar and xz."""
    names = " ".join(archive.name for archive in archives)
    lines = [
        "#!/bin/sh",
        "# Check the pieces beside this script and unpack them: sh unpack.sh SITE [ARCHIVE ...]; then export PYTHONPATH=SITE",
        "set -eu",
        '[ $# -ge 1 ] || { echo "unpack.sh: say where to: sh unpack.sh SITE [ARCHIVE ...]; archives: '
        + names
        + '" >&2; exit 2; }',
        'site=$1; shift; mkdir -p "$site"; site=$(cd "$site" && pwd); cd "$(dirname "$0")"',
        f"[ $# -ge 1 ] || set -- {names}",
        'for archive in "$@"; do',
        '  case "$archive" in',
    ]
    for archive in archives:
        sums = "\\n".join(f"{piece.sha256}  {piece.name}" for piece in archive.pieces)
        lines.append(f"    {archive.name}) sums='{sums}' ;;")
    lines += [
        f'    *) echo "unpack.sh: no archive $archive here; there are: {names}" >&2; exit 2 ;;',
        "  esac",
        '  printf "$sums\\n" | sha256sum --check --quiet - ||',
        '    { echo "unpack.sh: carry the pieces named above again" >&2; exit 1; }',
        '  cat "$archive".*.piece | tar -C "$site" -I "xz -T0" -xf -',
        '  echo "unpack.sh: $archive is in $site"',
        "done",
    ]
    return "\n".join(lines) + "\n"
