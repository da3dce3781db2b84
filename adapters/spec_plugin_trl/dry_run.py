"""A dry run of a script, for ``spec-plugin check trl``: it runs up to the line that makes the trainer, and no further.

``python -m spec_plugin_trl.dry_run OUT script.py …`` writes what the trainer was given to ``OUT``, as JSON: ``fields`` of its
configuration, ``model`` (its name; empty: an object that has none), and ``objections`` to the trainer itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import wrapt

from spec_plugin.adapter import Objection
from spec_plugin_trl import options, registration
from spec_plugin_trl.__main__ import run_script

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def main() -> None:
    """Run the script; nothing is written where it makes no trainer that generates by vLLM."""
    out = Path(sys.argv[1])

    def trainer_made(trainer: Any, given: Mapping[str, Any]) -> NoReturn:
        answer(given, options.of_trainer(type(trainer)))

    def other_made(trainer: Any, given: Mapping[str, Any]) -> None:
        if refused := [*options.of_other(type(trainer), given)]:
            answer(given, refused)

    def answer(given: Mapping[str, Any], objections: Iterable[Objection]) -> NoReturn:
        model = given.get("model")
        answered = {
            "fields": vars(given["args"]) if given.get("args") is not None else {},
            "model": model if isinstance(model, str) else getattr(model, "name_or_path", ""),
            "objections": [asdict(objection) for objection in objections],
        }
        out.write_text(json.dumps(answered, default=str))
        sys.exit(0)

    _end_with_parent()
    registration.keep_quiet()
    registration.before_trainer, registration.before_other = trainer_made, other_made
    registration.register()
    wrapt.register_post_import_hook(_no_training, "transformers.trainer")
    run_script(sys.argv[2:])


def _end_with_parent() -> None:
    """A check that is killed leaves no script behind it; where the system knows how (Linux)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _no_training(module: ModuleType) -> None:
    """Such as fine-tuning before RL, which takes hours."""

    def train(self: Any, *_: Any, **__: Any) -> NoReturn:
        sys.exit(f"it trains a {type(self).__name__} before it makes a GRPOTrainer or RLOOTrainer")

    module.Trainer.train = train


if __name__ == "__main__":
    main()
