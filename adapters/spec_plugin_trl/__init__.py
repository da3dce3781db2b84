"""spec-plugin's adapter for TRL: ``accelerate launch -m spec_plugin_trl train.py …``, or :func:`enable` in the script itself.

Options: ``--spec.k 5`` before the script's name, the variable ``SPEC_PLUGIN_TRL="k=5 train_share=0.3"`` (``0`` turns it off), or
``SpecArguments``, a dataclass for ``TrlParser``. Importing this package does nothing.
"""

from __future__ import annotations

from typing import Any

__all__ = ["SpecArguments", "enable"]


def enable(arguments: Any = None, /, **options: Any) -> None:
    """Turn speculative rollouts on for the trainers that this process makes from now on; once is enough.

    Args:
        arguments: of ``SpecArguments``, as ``TrlParser`` has read them.
        options: by name, ``k=5``; they take the place of those in ``arguments``, which take that of the variable's.

    Raises:
        SpecConfigError: naming an option that does not exist, or whose value is out of bounds.
    """
    from spec_plugin_trl import flag, registration

    if flag.choose(arguments, options):
        registration.register()


def __getattr__(name: str) -> Any:
    if name != "SpecArguments":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from spec_plugin_trl.arguments import SpecArguments

    return SpecArguments
