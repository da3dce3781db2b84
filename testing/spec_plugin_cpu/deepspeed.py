"""DeepSpeed's collectives in shared memory would have to be compiled, for minutes, in each new environment."""

from __future__ import annotations

from spec_plugin_cpu.shims import Shims


def collectives_by_gloo(shims: Shims) -> None:
    """Let DeepSpeed go on as where its operator cannot be built: its collectives go through gloo.

    Args:
        shims: of the package that needs it.

    Raises:
        PatchError: if DeepSpeed's function is gone or no longer looks as expected.
    """
    shims.replace(
        "deepspeed.comm.torch",
        "build_shm_op",
        lambda _original: _no_op,
        landmarks=("ShareMemCommBuilder", "return None"),
    )


def _no_op() -> None:
    """What DeepSpeed's function returns where its operator cannot be built."""
