"""The launcher, and the flag: ``accelerate launch -m spec_plugin_trl [--spec.NAME VALUE …] script.py …``, or ``… -m module …``.

``python -m spec_plugin_trl script.py …`` and ``torchrun -m spec_plugin_trl script.py …`` work alike; in the place of
``trl grpo …`` it is ``accelerate launch -m spec_plugin_trl -m trl.scripts.grpo …``.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from spec_plugin.adapter import ENABLE, SpecConfigError, help_text, split_arguments
from spec_plugin_trl import flag, registration


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script with the flag set, as if it had been named after ``python``.

    Raises:
        SystemExit: with one line, if an option is wrong or no script is named.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or given[0] in ("-h", "--help"):
        print(f"{__doc__}\n{help_text()}")
        return
    try:
        theirs, ours = split_arguments(given)
        if not theirs or (theirs[0] == "-m" and len(theirs) < 2):
            raise SpecConfigError("no script is named: python -m spec_plugin_trl [--spec.NAME VALUE …] script.py …")
        if not ours.pop(ENABLE, True):
            os.environ[flag.FLAG] = "0"  # the script may ask for drafts itself
        elif flag.choose(given=ours):
            registration.register()
    except SpecConfigError as error:
        sys.exit(f"spec-plugin: {error}")
    run_script(theirs)


def run_script(words: Sequence[str]) -> None:
    """Run a script, or ``-m module``, as if it had been named after ``python``.

    Args:
        words: its name, and its arguments.
    """
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
