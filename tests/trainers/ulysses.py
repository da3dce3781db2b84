"""Two forked gloo ranks of verl's own FSDP2 engine with Ulysses sequence parallelism; prints what they harvest, as JSON.

verl itself does not run Ulysses on a CPU: its attention goes through transformers' flash attention. Here that one function is
SDPA over the packed row, and gloo gets an all_to_all. The engine, its packing, slicing and gathering are verl's.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    VERL_PLATFORM="cpu",
    VERL_ENGINE_DEVICE="cuda",
    VERL_USE_EXTERNAL_MODULES="spec_plugin_verl_cpu",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
)

import spec_plugin_verl  # noqa: F401  (the flag)
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers.modeling_utils as modeling
import verl  # noqa: F401
from spec_plugin_verl.backends.fsdp import FsdpActor
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from transformers.integrations import flash_attention
from verl.models.transformers import monkey_patch
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry

from spec_plugin import SpecConfig
from spec_plugin.api.events import HiddenStates, TargetInfo
from spec_plugin.api.hookspecs import hookimpl
from spec_plugin.api.ranks import actor_group
from spec_plugin.lifecycle.session import SpecSession

RANKS, AUX = 2, (2, 4, 5)
LENGTHS, RESPONSES = (9, 14, 6, 20), (4, 7, 3, 11)


class Kept:
    """A plugin that keeps what is harvested."""

    def __init__(self) -> None:
        self.packs: list[HiddenStates] = []

    @hookimpl
    def spec_target_forward(self, hidden: HiddenStates) -> None:
        """Keep it."""
        self.packs.append(hidden)


def packed_attention(
    q: Any, k: Any, v: Any, *_: Any, position_ids: Any = None, softmax_scale: Any = None, **__: Any
) -> Any:
    """transformers' flash attention over one packed row [1, N, heads, D], by SDPA."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    document = torch.cumsum(position_ids[0] == 0, 0)
    mask = (document[:, None] == document[None, :]) & torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    grouped = q.shape[1] != k.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=softmax_scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def all_to_all(outputs: list[Any], inputs: list[Any], group: Any = None, async_op: bool = False) -> None:
    """gloo has none: everybody gathers everything and takes its part."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    sent = torch.stack(inputs)
    everything = [torch.empty_like(sent) for _ in range(size)]
    dist.all_gather(everything, sent.contiguous(), group=group)
    for output, part in zip(outputs, everything, strict=True):
        output.copy_(part[rank])


def stand_in() -> None:
    """Put both in; verl wraps what it finds under its own name when the engine is built."""
    dist.all_to_all = all_to_all
    monkey_patch._flash_attention_forward = packed_attention
    flash_attention._flash_attention_forward = packed_attention
    modeling.PreTrainedModel._flash_attn_can_dispatch = lambda self, *_, **__: True
    modeling.lazy_import_flash_attention = lambda *_, **__: None


def make_engine(model: str) -> FsdpActor:
    """verl's engine, as its actor worker builds it."""
    single = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine: FsdpActor = EngineRegistry.get_engine_cls("language_model", "fsdp2")(
        HFModelConfig(
            path=model,
            use_remove_padding=True,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "flash_attention_2"},
        ),
        FSDPEngineConfig(
            strategy="fsdp2",
            ulysses_sequence_parallel_size=RANKS,
            use_torch_compile=False,
            use_dynamic_bsz=False,
            mixed_precision=single,
            model_dtype="fp32",
            micro_batch_size_per_gpu=4,
            infer_micro_batch_size_per_gpu=4,
        ),
        FSDPOptimizerConfig(),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


def make_batch(ids: list[torch.Tensor]) -> TensorDict:
    """What verl's trainer sends to the log-prob pass."""

    def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    data = TensorDict(
        {
            "input_ids": jagged(ids),
            "position_ids": jagged([torch.arange(len(row)) for row in ids]),
            "loss_mask": jagged([torch.ones(n) for n in RESPONSES]),
            "response_mask": jagged([torch.ones(n) for n in RESPONSES]),
        },
        batch_size=[len(ids)],
    )
    options = {
        "use_remove_padding": True,
        "use_fused_kernels": False,
        "calculate_entropy": False,
        "use_dynamic_bsz": False,
    }
    sizes = {"micro_batch_size_per_gpu": 4, "max_token_len_per_gpu": 1000, "global_batch_size": 4}
    tu.assign_non_tensor(data, temperature=1.0, compute_loss=False, **options, **sizes)
    return data


def work(rank: int, model: str, folder: str) -> None:
    """One rank: harvest in verl's log-prob pass, and compare with a plain forward of transformers."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    stand_in()
    engine = make_engine(model)
    config = json.loads((Path(model) / "config.json").read_text())
    target = TargetInfo(path=model, hf_config=config, dtype="float32", actor_group=actor_group())
    session, kept = SpecSession(SpecConfig(), target), Kept()
    session.manager.register(kept)
    engine.attach(session, None).policy_version = 0
    assert session.method.harvest == AUX
    torch.manual_seed(0)
    ids = [torch.randint(2, 300, (n,)) for n in LENGTHS]
    with engine.eval_mode(), torch.no_grad():
        output = engine.infer_batch(make_batch(ids), None)
    (pack,) = kept.packs
    bare = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    aux, last, logprob, start = 0.0, 0.0, 0.0, 0
    with torch.no_grad():
        for row in (i for i in range(len(ids)) if i % RANKS == rank):
            plain = bare(ids[row][None], output_hidden_states=True)
            here = slice(start, start := start + LENGTHS[row])
            want = torch.cat([plain.hidden_states[i][0] for i in AUX], -1)
            aux = max(aux, float((pack.aux[here] - want).abs().max()))
            last = max(last, float((pack.last[here] - plain.hidden_states[-1][0]).abs().max()))
            theirs = torch.log_softmax(plain.logits[0], -1)[:-1].gather(1, ids[row][1:, None])[:, 0]
            ours = output["model_output"]["log_probs"][row][: LENGTHS[row] - 1]
            logprob = max(logprob, float((ours - theirs).abs().max()))
    found = {"lengths": pack.lengths, "aux": aux, "last": last, "logprob": logprob, "failed": session.failure}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(work, tuple(sys.argv[1:3]), nprocs=RANKS, start_method="fork")
    print("RESULT " + json.dumps([json.loads((Path(sys.argv[2]) / f"{r}.json").read_text()) for r in range(RANKS)]))
