"""The launcher: takes ``--spec.*`` off the command line and runs OpenRLHF's own ``train_ppo_ray`` with the rest."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

from spec_plugin.arguments import ENABLE, help_text, split_arguments

TRAINER = "openrlhf.cli.train_ppo_ray"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the trainer; without ``--spec.enable`` exactly as if this package were not there.

    Raises:
        SpecConfigError: if an option is wrong, or the run has something that is not supported; before Ray starts.
    """
    theirs, ours = split_arguments(list(sys.argv[1:] if argv is None else argv))
    asked_for_help = any(a in ("-h", "--help") for a in theirs)
    if ours.pop(ENABLE, False) and not asked_for_help:
        from spec_plugin_openrlhf.registration import install

        install(theirs, ours)
    elif ours and not asked_for_help:
        sys.exit(f"spec-plugin: --spec.{next(iter(ours))} has no effect without --spec.enable; add it, or leave it out")
    sys.argv = [TRAINER, *theirs]
    try:
        runpy.run_module(TRAINER, run_name="__main__", alter_sys=True)
    finally:
        if asked_for_help:
            print(help_text())


if __name__ == "__main__":
    main()
