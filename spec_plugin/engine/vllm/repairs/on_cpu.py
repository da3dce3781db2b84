"""The door to the repairs of vLLM's CPU build: they are a distribution of their own, of which a run on a card loads nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from torch import nn

from spec_plugin.api.diagnosis import INSTALL_CPU
from spec_plugin.api.errors import SpecConfigError
from spec_plugin.engine.vllm.repairs import patches
from spec_plugin.engine.vllm.repairs.adapters import ADAPTER_PATCHES
from spec_plugin.engine.vllm.repairs.draft_noise import NOISE_PATCHES
from spec_plugin.engine.vllm.repairs.graphs import GRAPH_PATCHES
from spec_plugin.engine.vllm.repairs.patches import PatchStatus

#: entry points: a module with ``CPU_PATCHES``, ``register_kernels()`` and ``repack(model)``
GROUP = "spec_plugin_cpu_repairs"


def on_cpu() -> bool:
    """True if vLLM runs on its CPU backend here."""
    from vllm.platforms import current_platform  # resolving the platform is not free: only when asked

    return bool(current_platform.is_cpu())


@functools.cache
def cpu_repairs() -> Any:
    """The module of the repairs, looked for once: a refresh asks each time.

    Raises:
        SpecConfigError: if it is not installed: without it samples of vLLM's CPU build are not the policy's.
    """
    for found in metadata.entry_points(group=GROUP):
        return found.load()
    raise SpecConfigError(
        f"vLLM's CPU build cannot speculate without its repairs, of spec-plugin-testing, which is not installed: {INSTALL_CPU}"
    )


def apply_cpu_patches(skip: Iterable[str] = ()) -> list[PatchStatus]:
    """Apply every CPU patch that this process needs; nothing on another platform. Call before the model is loaded.

    Args:
        skip: names of patches to leave out (and to take back, if in force).

    Raises:
        SpecConfigError: if ``skip`` names no known patch, or the repairs are not installed where they are needed.
        PatchError: if a patch no longer fits the installed vLLM.
    """
    skipped, cpu = frozenset(skip), cpu_repairs().CPU_PATCHES if on_cpu() else ()
    known = [patch.name for patch in (*cpu, *ADAPTER_PATCHES, *GRAPH_PATCHES, *NOISE_PATCHES)]
    if unknown := sorted(skipped.difference(known)):
        raise SpecConfigError(f"additional_config.spec_plugin.skip_patches={unknown}: no such patch; known: {known}")
    return patches.apply_each(cpu, skipped)


def repack(model: nn.Module) -> None:
    """Have linear layers that vLLM's CPU build has packed compute with their weights as they are now; on a card none is."""
    if on_cpu():
        cpu_repairs().repack(model)
