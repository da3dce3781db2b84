"""Pack vLLM, a trainer and what this project needs for a GPU machine without a network: ``pack_card.py OUT --trainer trl``.

The machine has CPython 3.12 on x86-64 with the glibc of Ubuntu 24.04, and an image that holds torch 2.11 (CUDA 13) and
transformers; ``--have`` names a file with what it holds (``pip list --format=freeze``). vLLM 0.26 is the newest for this torch.
OUT gets pieces that can be carried one by one, a manifest, and ``unpack.sh`` for the other side. What is for other cards, other
models or nobody is left out (card_contents.py says why), and GPU code for other cards becomes zeros in vLLM's libraries
(card_fatbin.py). Wheels are kept in .cache/card/wheels, so that a second call downloads nothing.

``--check`` packs nothing: it unpacks OUT into a scratch folder and builds the flag's configuration for a stub of an H100 there.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import card_contents
import card_pieces
from card_wheels import CannotPack, Shelf, Wheel, lacking, names_in, parsed

ROOT = card_contents.ROOT
HAS = ROOT / "tools" / "card_has.txt"
PIECE_MIB = 52.0


def say(text: str) -> None:
    """A line of progress."""
    print(f"pack_card: {text}", flush=True)


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, parsed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "out", type=Path, metavar="OUT", help="folder for the pieces, outside the repository or in .cache"
    )
    parser.add_argument("--vllm", default="0.26.0", metavar="VERSION", help="of vLLM (default: 0.26.0)")
    parser.add_argument(
        "--have", type=Path, default=HAS, metavar="FILE", help=f"what the machine has (default: {HAS.name})"
    )
    parser.add_argument(
        "--trainer",
        action="append",
        choices=sorted(card_contents.TRAINERS),
        help="an archive of its own for each; repeatable (default: trl)",
    )
    parser.add_argument(
        "--piece", type=float, default=PIECE_MIB, metavar="MIB", help="most that one holds (default: 52)"
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        choices=sorted(card_contents.LEFT_OUT),
        metavar="PATTERN",
        help="do not leave this out; a pattern of card_contents.py",
    )
    parser.add_argument("--every-card", action="store_true", help="keep GPU code for other cards, too")
    parser.add_argument("--check", action="store_true", help="try what lies in OUT")
    parser.add_argument(
        "--python",
        type=Path,
        metavar="PATH",
        help="for --check: a Python 3.12 with what the machine has, torch 2.11 among it",
    )
    found = parser.parse_args(argv)
    if not re.fullmatch(r"\d+\.\d+\.\d+", found.vllm):
        parser.error(f"--vllm {found.vllm}: give a release, such as 0.26.0")
    if not found.have.is_file():
        parser.error(f"--have {found.have}: no such file; there, `pip list --format=freeze` writes one")
    if not found.piece > 0:
        parser.error(f"--piece {found.piece}: give MiB above 0")
    if found.check and not found.python:
        parser.error("--check needs --python: a Python 3.12 that has torch 2.11 and transformers")
    return found


def needed(asked: argparse.Namespace) -> dict[str, dict[str, Wheel]]:
    """Wheels by archive; what vLLM's has is in no trainer's, and a trainer's does not count on another's.

    Raises:
        CannotPack: if something is not to be had, or the machine's torch is not the one that vLLM was built with.
    """
    have = names_in(asked.have.read_text())
    shelf = Shelf(ROOT / ".cache" / "card" / "wheels", say)
    archives: dict[str, dict[str, Wheel]] = {}
    for name, requirements in card_contents.roots(asked.trainer or ["trl"], asked.vllm).items():
        there = {**have, **{wheel.name: wheel.version for wheel in archives.get("vllm", {}).values()}}
        never, pins = card_contents.NEVER, card_contents.PINS
        archives[name] = lacking(parsed(requirements), shelf.find, there, never, pins)
    torch = next(r for r in archives["vllm"]["vllm"].requires if r.name == "torch")
    of_machine = have.get("torch")
    if of_machine is not None and of_machine not in torch.specifier:
        raise CannotPack(
            f"vLLM {asked.vllm} was built with {torch}, and the machine has {of_machine}: give another --vllm"
        )
    return archives


def pack(asked: argparse.Namespace) -> None:
    """Download, trim, compress, cut."""
    begun = time.monotonic()
    asked.out.mkdir(parents=True, exist_ok=True)
    archives = []
    for name, wheels in needed(asked).items():
        with tempfile.TemporaryDirectory() as scratch:
            site = Path(scratch)
            for wheel in wheels.values():
                with zipfile.ZipFile(wheel.path) as archive:
                    archive.extractall(site)
            removed, zeroed = card_contents.trim(site, asked.keep, None if asked.every_card else card_contents.CARD)
            say(
                f"{name}: {len(wheels)} wheels of {_mib(_bytes(wheels))}; left out files of {_mib(removed)} unpacked, "
                f"GPU code for other cards of {_mib(zeroed)}; compressing"
            )
            versions = {wheel.name: str(wheel.version) for wheel in wheels.values()}
            archives.append(card_pieces.pack(site, name, versions, asked.out, int(asked.piece * card_pieces.MIB)))
        pieces = archives[-1].pieces
        say(f"{name}: {_mib(sum(p.bytes for p in pieces))} in {len(pieces)} piece(s)")
    card_pieces.write_manifest(asked.out, archives, {"python": "3.12", "card": "every" if asked.every_card else "9.0"})
    say(
        f"{asked.out / card_pieces.MANIFEST} lists them; carry all of OUT, then: sh unpack.sh SITE "
        f"({time.monotonic() - begun:.0f} s)"
    )


def _bytes(wheels: dict[str, Wheel]) -> int:
    return sum(wheel.path.stat().st_size for wheel in wheels.values())


def _mib(size: float) -> str:
    return f"{size / card_pieces.MIB:.1f} MiB"


def check(asked: argparse.Namespace) -> int:
    """Try vLLM's pieces with each trainer's in turn, as a machine would have them; 0 if all serve."""
    archives = card_pieces.read_manifest(asked.out)
    card_pieces.verify(asked.out, archives)
    first, *trainers = [archive.name for archive in archives]
    failed = []
    for trainer in [name for name in trainers if name in (asked.trainer or trainers)]:
        with tempfile.TemporaryDirectory() as site:
            card_pieces.unpack(asked.out, Path(site), (first, trainer))
            say(f"{first} and {trainer}: sha256 right, unpacked")
            command = [asked.python, ROOT / "tools" / "card_check.py", site, trainer]
            if subprocess.run([str(word) for word in command], cwd=ROOT).returncode:
                failed.append(trainer)
    say(f"does not serve: {', '.join(failed)}" if failed else "all serve")
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Pack, or try what was packed."""
    asked = options(argv)
    try:
        if asked.check:
            return check(asked)
        pack(asked)
    except (CannotPack, card_pieces.Broken) as error:
        print(f"pack_card: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
