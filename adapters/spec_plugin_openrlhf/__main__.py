"""The launcher: takes ``--spec.*`` off the command line and runs OpenRLHF's own ``train_ppo_ray`` with the rest."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

from spec_plugin.adapter import ENABLE, SpecConfigError, help_text, split_arguments

TRAINER = "openrlhf.cli.train_ppo_ray"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the trainer; without ``--spec.enable``, or with ``--spec.enable=false``, exactly as if this package were not there.

    Raises:
        SystemExit: with one line that says so, if an option is wrong, or the run has something that is not supported; before
            Ray starts.
    """
    try:
        theirs, asked_for_help = _prepared(list(sys.argv[1:] if argv is None else argv))
    except SpecConfigError as error:
        sys.exit(f"spec-plugin: {error}")
    sys.argv = [TRAINER, *theirs]
    try:
        runpy.run_module(TRAINER, run_name="__main__", alter_sys=True)
    finally:
        if asked_for_help:
            print(help_text())


def _prepared(argv: Sequence[str]) -> tuple[list[str], bool]:
    """OpenRLHF's own arguments, with our classes in place if they are wanted; and whether only the help is."""
    theirs, ours = split_arguments(argv)
    asked_for_help = any(a in ("-h", "--help") for a in theirs)
    enabled = ours.pop(ENABLE, None)
    if enabled and not asked_for_help:
        from spec_plugin_openrlhf.registration import install

        install(theirs, ours)
    elif enabled is None and ours and not asked_for_help:
        name = next(iter(ours))
        raise SpecConfigError(f"--spec.{name} has no effect without --spec.enable; add it, or leave it out")
    return theirs, asked_for_help


if __name__ == "__main__":
    main()
