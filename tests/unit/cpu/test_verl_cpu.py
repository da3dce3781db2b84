"""What verl gets wrong where the device is the CPU already; a test that fails here says that upstream has mended it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("verl")


def test_verl_keeps_no_copy_of_weights_that_are_on_the_cpu_already():
    """When this fails: drop ``copy_saved_weights`` from spec_plugin_verl_cpu.platform."""
    weight = torch.ones(2)
    kept = weight.detach().cpu()  # what fsdp2_sharded_save_to_cpu does
    weight.add_(1)
    assert kept.tolist() == [2.0, 2.0]
    from spec_plugin.plan.sources import source_of

    assert "local_cpu_tensor = local_gpu_tensor.detach().cpu()\n" in source_of("verl", "utils/fsdp_utils.py")
