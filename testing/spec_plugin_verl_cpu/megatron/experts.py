"""Experts of a mixture on a CPU: one after the other, with the names that Transformer Engine's grouped experts have."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn


class _Grouped(nn.Module):
    """One linear layer for each expert of this rank: parameters ``weight0``, ``weight1`` …, [out, in]."""

    def __init__(self, experts: int, shape: tuple[int, int], config: Any) -> None:
        super().__init__()
        for i in range(experts):
            weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            config.init_method(weight)
            weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]  # else of its own group
            self.register_parameter(f"weight{i}", weight)

    def weight(self, expert: int) -> Tensor:
        found: Tensor = getattr(self, f"weight{expert}")
        return found


class CpuExperts(MegatronModule):  # type: ignore[misc]
    """In the place of ``TEGroupedMLP``: gated experts without biases, each whole on one rank."""

    def __init__(self, num_local_experts: int, config: Any, *_args: Any, **_kwargs: Any) -> None:
        """As Megatron builds it.

        Raises:
            NotImplementedError: for experts that are split over tensor parallel ranks.
        """
        super().__init__(config=config)
        if mpu.get_expert_tensor_parallel_world_size() > 1:
            raise NotImplementedError(
                "splitting one expert over ranks does not run on a CPU: set expert_tensor_parallel_size=1"
            )
        self.num_local_experts = num_local_experts
        hidden, inner = config.hidden_size, config.moe_ffn_hidden_size
        self.linear_fc1 = _Grouped(num_local_experts, (2 * inner, hidden), config)
        self.linear_fc2 = _Grouped(num_local_experts, (hidden, inner), config)

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """[n, H], sorted by expert, from the same; ``permuted_probs`` [n] weighs each row."""
        counts = tokens_per_expert.tolist()
        rows = torch.split(permuted_local_hidden_states, counts)
        weights = torch.split(permuted_probs, counts)
        out = []
        for i, (x, weight) in enumerate(zip(rows, weights, strict=True)):
            gate, up = F.linear(x, self.linear_fc1.weight(i)).chunk(2, dim=-1)
            inner = (F.silu(gate) * up * weight[:, None]).to(x.dtype)
            out.append(F.linear(inner, self.linear_fc2.weight(i)))
        return torch.cat(out), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """For Megatron's checkpoints: each expert under its number among all."""
        first = mpu.get_expert_model_parallel_rank() * self.num_local_experts
        replica = (0, 0, mpu.get_expert_data_parallel_rank())
        out: dict[str, Any] = {}
        for name, tensor in self.state_dict(prefix="", keep_vars=True).items():
            linear, _, expert = name.rpartition("weight")
            key = f"{prefix}{linear}weight{first + int(expert)}"
            out[f"{prefix}{name}"] = ShardedTensor.from_rank_offsets(
                key, tensor, *sharded_offsets, replica_id=replica, prepend_axis_num=len(sharded_offsets)
            )
        return out
