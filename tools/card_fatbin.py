"""GPU code for other cards in a shared object becomes zeros, which compress to nothing: for ``pack_card.py``.

The section ``.nv_fatbin`` holds fat binaries: a header (magic number, version, its size, size of what follows), then entries,
each with a header (kind, size, architecture) before its code. The driver chooses by these headers, which stay as they are, so
it chooses as before. What is overwritten is code that such a card cannot load, or would not prefer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAGIC = 0xBA55ED50
_HEADER = struct.Struct("<IHHQ")  # magic, version, its size, size of the entries
_ENTRY = struct.Struct(
    "<HHIQIIHHI"
)  # kind, version, its size, size of the code, (4: compression, versions), architecture
_PTX, _MACHINE = 1, 2


class UnknownFormat(ValueError):
    """The section does not look as this module knows it."""


@dataclass(frozen=True)
class Code:
    """One entry of a fat binary."""

    kind: int
    architecture: int  # 90 for 9.0
    begin: int  # of its code in the file
    end: int

    def runs_on(self, card: int) -> bool:
        """Can the card load it: machine code of its own generation, not newer; intermediate code that is not newer."""
        if self.kind == _PTX:
            return self.architecture <= card
        return self.kind != _MACHINE or card // 10 * 10 <= self.architecture <= card


def without_other_cards(data: bytes, card: int) -> tuple[bytes, int]:
    """A shared object with zeros in the place of GPU code that such a card does not run.

    Machine code for the card wins over intermediate code, which the driver would have to compile.

    Args:
        data: the file.
        card: compute capability times ten.

    Returns:
        The file, as long as before, and how many bytes became zero.

    Raises:
        UnknownFormat: if the section is not what is described above; nothing may be guessed here.
    """
    begin, size = _section(data, b".nv_fatbin")
    out, zeroed = bytearray(data), 0
    for codes in _fat_binaries(data, begin, begin + size):
        fit = [code for code in codes if code.runs_on(card)]
        machine = [code for code in fit if code.kind != _PTX]
        for code in codes:
            if code not in (machine or fit):
                out[code.begin : code.end] = bytes(code.end - code.begin)
                zeroed += code.end - code.begin
    return bytes(out), zeroed


def _section(data: bytes, name: bytes) -> tuple[int, int]:
    """Offset and size of a section of a 64-bit little-endian ELF file; size 0 where there is none."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise UnknownFormat("no 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    for row in rows:
        at = rows[names][4] + row[0]
        if data[at : data.index(b"\0", at)] == name:
            return row[4], row[5]
    return 0, 0


def _fat_binaries(data: bytes, at: int, end: int) -> Iterator[list[Code]]:
    """The entries of each fat binary in a section; between two there is padding alone."""
    while at < end:
        if data[at : at + 8] == bytes(8):
            at += 8
            continue
        magic, _, header, size = _HEADER.unpack_from(data, at)
        if magic != MAGIC:
            raise UnknownFormat(f"no fat binary at byte {at}")
        yield list(_codes(data, at + header, at + header + size))
        at += header + size


def _codes(data: bytes, at: int, end: int) -> Iterator[Code]:
    while at < end:
        kind, _, header, size, *_, architecture = _ENTRY.unpack_from(data, at)
        if kind not in (_PTX, _MACHINE) or not 20 <= architecture <= 200:
            raise UnknownFormat(f"no entry of a fat binary at byte {at}: kind {kind}, architecture {architecture}")
        yield Code(kind, architecture, at + header, at + header + size)
        at += header + size
    if at != end:
        raise UnknownFormat(f"entries end at byte {at}, their fat binary at {end}")
