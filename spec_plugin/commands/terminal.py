"""The edge to the terminal: what others wrote is shown there, never obeyed."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click


def visible(text: str) -> str:
    """A text as it may be printed: control characters, which move the cursor or retitle windows, are shown as escapes.

    Line ends and tabs stay; so do all letters. Marks that turn the direction of writing are shown, too.
    """
    return "".join(c if c in "\n\t" or not _obeyed(c) else c.encode("unicode_escape").decode() for c in text)


def _obeyed(character: str) -> bool:
    return (
        unicodedata.category(character) == "Cc"
        or "\u202a" <= character <= "\u202e"
        or "\u2066" <= character <= "\u2069"
    )


def echo(text: str) -> None:
    """Print a text with its control characters escaped."""
    click.echo(visible(text))


@contextmanager
def progress_bar(label: str, total: int, show: bool, done: int = 0) -> Iterator[Callable[[int, str], None]]:
    """A bar, for the block.

    Args:
        label: before the bar.
        total: of what is done at its end.
        show: draw it.
        done: before the block.

    Yields:
        What is called with how much is done now, and a few words behind the bar.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # not for commands without a bar

    columns = (TextColumn(label), BarColumn(), TextColumn("{task.fields[words]}"), TimeRemainingColumn())
    with Progress(*columns, disable=not show) as progress:
        task = progress.add_task(label, total=total, completed=done, words="")
        yield lambda now, words: progress.update(task, completed=now, words=words)


class Refused(click.ClickException):
    """An error that is printed as one sentence."""

    exit_code = 2

    def __init__(self, error: object) -> None:
        super().__init__(visible(str(error)))
