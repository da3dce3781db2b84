"""Harvest through the sharding wrappers of both FSDP generations."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from spec_plugin.api.events import HiddenStates
from spec_plugin.trainer.decoder import find_decoder
from spec_plugin.trainer.harvest import harvested, responses_at_the_end
from spec_plugin.trainer.harvest_plan import HarvestPlan
from spec_plugin.trainer.taps import Taps

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "vocab_size": 61, "head_dim": 32}


@pytest.fixture
def single_process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def harvest(model: torch.nn.Module) -> HiddenStates:
    ids = torch.arange(20).view(2, 10)
    taps = Taps.of(find_decoder(model), (2, 4, 5))  # type: ignore[arg-type]
    with torch.no_grad(), taps.attached():
        model(input_ids=ids, use_cache=False)
    hidden = harvested(taps, (list(ids), responses_at_the_end(list(ids), [4, 4])), HarvestPlan(100))
    assert hidden is not None
    return hidden


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("generation", ["fsdp", "fsdp2"])
def test_harvest_through_fsdp_is_that_of_the_bare_model(generation: str, single_process_group: None) -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(num_attention_heads=2, num_key_value_heads=1, **SIZES)).eval()
    want = harvest(model)
    if generation == "fsdp":
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Qwen3DecoderLayer})
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    else:
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    got = harvest(model)
    torch.testing.assert_close(got.aux, want.aux)
    torch.testing.assert_close(got.last, want.last)
