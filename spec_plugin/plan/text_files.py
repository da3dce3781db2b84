"""Files that others wrote, and that a command is pointed at: one reader with limits for all of them, and one way to write.

Whoever types a path may mean a pipe, a device without an end, a folder, or more than fits into memory: each is one sentence
here, and nothing waits for ever.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from spec_plugin.api.errors import SpecConfigError

#: bytes of a text file
MOST_BYTES = 1 << 29


def check_regular(file: Path) -> int:
    """Refuse what is no file to read from its beginning to its end, before it is opened.

    Returns:
        Its size in bytes.

    Raises:
        SpecConfigError: saying what it is instead.
    """
    try:
        found = file.stat()
    except OSError as error:
        raise SpecConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(found.st_mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise SpecConfigError(f"{file} is {kinds.get(stat.S_IFMT(found.st_mode), 'a device')}: give a file")
    return found.st_size


def lines_of(file: Path) -> Iterator[str]:
    """The lines of a text file, each with its end; what is no UTF-8 is replaced.

    Raises:
        SpecConfigError: if it is no regular file, cannot be read, or has more than ``MOST_BYTES``.
    """
    if check_regular(file) > MOST_BYTES:
        raise SpecConfigError(f"{file} cannot be read: it has more than {MOST_BYTES >> 20} MiB")
    try:
        with file.open(encoding="utf-8-sig", errors="replace") as stream:
            yield from stream
    except OSError as error:
        raise SpecConfigError(f"{file} cannot be read: {error.strerror or error}") from error


def text_of(file: Path) -> str:
    """A whole text file.

    Raises:
        SpecConfigError: as ``lines_of`` does.
    """
    return "".join(lines_of(file))


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
