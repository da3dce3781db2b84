"""The edge to the terminal: what others wrote is shown there, never obeyed."""

from __future__ import annotations

import unicodedata

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
    """Print it."""
    click.echo(visible(text))


class Refused(click.ClickException):
    """What was asked cannot be, in one sentence."""

    def __init__(self, error: object) -> None:
        """For an error, or a text."""
        super().__init__(visible(str(error)))


class RefusedOption(Refused):
    """The same, with the exit code of a wrong option."""

    exit_code = 2
