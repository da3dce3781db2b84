"""The command's door: what imports the rest, so that Ctrl-C while it does ends in a line and not in a traceback."""

from __future__ import annotations

import sys


def main() -> None:
    """Run ``spec-plugin``."""
    try:
        from spec_plugin.commands.cli import main as command

        command()
    except KeyboardInterrupt:
        print("Aborted!", file=sys.stderr)  # as click says it, once it is there
        sys.exit(130)


if __name__ == "__main__":
    main()
