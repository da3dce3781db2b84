"""The draft trainer behind its hooks, on a tiny target: what is synced to it, what is captured for it."""

from __future__ import annotations

from typing import Any

import pluggy
import torch

from spec_plugin import SpecConfig
from spec_plugin.api import hookspecs
from spec_plugin.api.events import HiddenStates, TargetInfo, WeightSync
from spec_plugin.lifecycle.manager import method_of
from spec_plugin.methods.eagle3 import Eagle3Method
from spec_plugin.policy.online_training import DraftTraining

V, H, LAYERS = 96, 64, 8
HF = {
    "model_type": "qwen3",
    "hidden_size": H,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": V,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    "max_position_embeddings": 256,
    "hidden_act": "silu",
}
TARGET = TargetInfo(path="/nowhere", hf_config=HF, dtype="float32", max_num_seqs=4)


def plugin(**options: object) -> Any:
    """The hooks of the draft trainer, alone in a manager."""
    manager = pluggy.PluginManager("spec_plugin")
    manager.add_hookspecs(hookspecs)
    manager.register(DraftTraining())
    manager.register(Eagle3Method())
    config = SpecConfig(**options)  # type: ignore[arg-type]
    manager.hook.spec_configure(config=config, target=TARGET, method=method_of(config, TARGET, manager))
    return manager.hook


def sync(version: int = 0) -> WeightSync:
    stream = torch.Generator().manual_seed(version)
    return WeightSync(version, torch.randn(V, H, generator=stream), torch.randn(V, H, generator=stream))


def hidden(tokens: torch.Tensor, version: int = 0) -> HiddenStates:
    n = len(tokens)
    states = torch.randn(n, 4 * H, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(n) >= 4
    return HiddenStates(tokens, states[:, : 3 * H], states[:, 3 * H :], mask, (n // 2, n - n // 2), version)
