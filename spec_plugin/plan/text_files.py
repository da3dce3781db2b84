"""Files that others wrote, and that a command is pointed at: one reader with limits for all of them, and one way to write.

Whoever types a path may mean a pipe, a device without an end, a folder, or a few MiB that unpack to all of the memory: each is
one sentence here, and nothing waits for ever.
"""

from __future__ import annotations

import gzip
import os
import stat
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spec_plugin.api.errors import SpecConfigError

#: bytes of a file, unpacked if it is packed, and of one line
MOST_BYTES, MOST_OF_A_LINE = 1 << 29, 1 << 24
_PACKED = ".gz"
_CHUNK = 1 << 16


class TooMuchError(EOFError):
    """A file goes on beyond its limit; what came before it may be used."""


def check_regular(file: Path) -> None:
    """Refuse what is no file to read from its beginning to its end, before it is opened.

    Raises:
        SpecConfigError: saying what it is instead.
    """
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise SpecConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise SpecConfigError(f"{file} is {kinds.get(stat.S_IFMT(mode), 'a device')}: give a file")


def _chunks(stream: Any, most: int) -> Iterator[bytes]:
    """What is in a binary stream; it ends with an error at its limit."""
    left = most
    while chunk := stream.read1(_CHUNK):
        left -= len(chunk)
        if left < 0:
            raise TooMuchError(f"it has more than {most >> 20} MiB")
        yield chunk


def lines_of(file: Path, most: int = MOST_BYTES) -> Iterator[str]:
    """The lines of a text file, packed or not, each with its end; what is no UTF-8 is replaced.

    Raises:
        SpecConfigError: if it is no regular file, or cannot be read.
        TooMuchError: at the limit, of the file or of a line; the lines before it have been handed out.
        zlib.error, gzip.BadGzipFile, EOFError: where a packed file is broken.
    """
    check_regular(file)
    try:
        stream: Any = (gzip.open if file.suffix == _PACKED else open)(file, "rb")
    except OSError as error:
        raise SpecConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    rest, first = b"", True
    with stream:
        for chunk in _chunks(stream, most):
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                yield _text(line, first) + "\n"
                first = False
            if len(rest) > MOST_OF_A_LINE:
                raise TooMuchError(f"a line has more than {MOST_OF_A_LINE >> 20} MiB")
    if rest:
        yield _text(rest, first)


def _text(line: bytes, first: bool) -> str:
    return line.decode("utf-8-sig" if first else "utf-8", errors="replace").removesuffix("\r")


def text_of(file: Path) -> str:
    """A whole text file.

    Raises:
        SpecConfigError: if it is no regular file, cannot be read, or has more than ``MOST_BYTES``.
    """
    try:
        return "".join(lines_of(file))
    except (OSError, EOFError, zlib.error) as error:
        raise SpecConfigError(f"{file} cannot be read: {error}") from error


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a file, or leave what was there: on a full disk an older one stays.

    Raises:
        OSError: if it cannot be written.
    """
    data = content.encode("utf-8", errors="backslashreplace") if isinstance(content, str) else content
    if file.exists() and not file.is_file():  # /dev/stdout, say
        file.write_bytes(data)
        return
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
