"""verl's own Megatron engine in each layout, on one or two forked gloo ranks; prints what they harvest, as JSON.

Each layout against transformers: auxiliary states, final norm, log-probs (on every rank, whichever stage computed them), and
the weights that leave for the engine, names and values.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(
    VERL_PLATFORM="cpu",
    VERL_ENGINE_DEVICE="cuda",
    VERL_USE_EXTERNAL_MODULES="spec_plugin_verl_cpu,spec_plugin_verl_cpu.megatron",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
)

import spec_plugin_verl  # noqa: F401  (the flag)
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from spec_plugin_verl_cpu.run import CARDS_OWN
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
from verl.workers.engine import EngineRegistry

from spec_plugin import SpecConfig
from spec_plugin.api.events import HiddenStates, TargetInfo
from spec_plugin.api.hookspecs import hookimpl
from spec_plugin.api.ranks import actor_group
from spec_plugin.lifecycle.session import SpecSession

AUX = (2, 4, 5)
LENGTHS, RESPONSES, MICRO = (13, 24, 7, 30, 18, 21), (8, 16, 4, 20, 12, 14), 2
#: name -> ranks, engine options
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one padded": (1, {}),
    "one packed": (1, {"use_remove_padding": True}),
    "tp2 padded": (2, {"tensor_model_parallel_size": 2}),
    "tp2 packed": (2, {"tensor_model_parallel_size": 2, "use_remove_padding": True}),
    "pp2 padded": (2, {"pipeline_model_parallel_size": 2}),
    "pp2 packed": (2, {"pipeline_model_parallel_size": 2, "use_remove_padding": True}),
    "cp2 padded": (2, {"context_parallel_size": 2}),
    "cp2 packed": (2, {"context_parallel_size": 2, "use_remove_padding": True}),
    "moe one": (1, {}),
    "moe tp2": (2, {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    "moe ep2": (2, {"expert_model_parallel_size": 2, "use_remove_padding": True}),
}
#: a stage whose layers are not called as expected
FAULTY = "pp2 faulty"
#: where documents are put together; no rank runs
PLACES = "places"
#: kernels for groups of experts are a card's
EXPERTS = {"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": False, "moe_permute_fusion": False}


class Kept:
    """A plugin that keeps what is harvested."""

    def __init__(self) -> None:
        self.packs: list[HiddenStates] = []

    @hookimpl
    def spec_target_forward(self, hidden: HiddenStates) -> None:
        """Keep it."""
        self.packs.append(hidden)


def make_engine(model: str, options: dict[str, Any]) -> Any:
    """verl's engine, as its actor worker builds it."""
    override = {name: False for name in CARDS_OWN} | {"attention_backend": "unfused"}
    if Path(model).name.endswith("moe"):
        override |= EXPERTS
    sizes = {"micro_batch_size_per_gpu": MICRO, "infer_micro_batch_size_per_gpu": MICRO, "use_dynamic_bsz": False}
    fixed = {"vanilla_mbridge": True, "override_transformer_config": override, **sizes}
    engine = EngineRegistry.get_engine_cls("language_model", "megatron")(
        HFModelConfig(path=model),
        McoreEngineConfig(**{"use_remove_padding": False, **fixed, **options}),
        McoreOptimizerConfig(lr=1e-2, total_training_steps=10, weight_decay=0.0),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


def make_batch(ids: list[torch.Tensor], packed: bool) -> TensorDict:
    """What verl's trainer sends to the log-prob pass."""

    def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    responses = jagged([torch.ones(n, dtype=torch.int64) for n in RESPONSES])
    tensors = {"input_ids": jagged(ids), "loss_mask": responses, "response_mask": responses}
    data = TensorDict({**tensors, "temperature": torch.ones(len(ids))}, batch_size=[len(ids)])
    sizes = {"micro_batch_size_per_gpu": MICRO, "use_dynamic_bsz": False}
    tu.assign_non_tensor(data, calculate_entropy=False, use_remove_padding=packed, **sizes)
    return data


def attach(engine: Any, model: str) -> Kept:
    """A session, as the rollout adapter makes it, without an engine."""
    config = json.loads((Path(model) / "config.json").read_text())
    target = TargetInfo(path=model, hf_config=config, dtype="float32", actor_group=actor_group())
    session, kept = SpecSession(SpecConfig(), target), Kept()
    session.manager.register(kept)
    engine.attach(session, None).policy_version = 0
    assert session.method.harvest == AUX
    return kept


def compared(
    pack: HiddenStates, log_probs: torch.Tensor, ids: list[torch.Tensor], mine: list[int], model: str
) -> dict[str, float]:
    """The largest differences from a plain forward of transformers."""
    bare = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    worst, start = {"aux": 0.0, "last": 0.0, "logprob": 0.0}, 0

    def at_most(name: str, difference: torch.Tensor) -> None:
        worst[name] = max(worst[name], float(difference.abs().max()))

    with torch.no_grad():
        for i, row in enumerate(ids):
            plain = bare(row[None], output_hidden_states=True)
            theirs = torch.log_softmax(plain.logits[0], -1)[:-1].gather(1, row[1:, None])[:, 0]
            at_most("logprob", log_probs[i][: len(row) - 1] - theirs)
            if i in mine:
                here = slice(start, start := start + len(row))
                at_most("aux", pack.aux[here] - torch.cat([plain.hidden_states[j][0] for j in AUX], -1))
                at_most("last", pack.last[here] - plain.hidden_states[-1][0])
    return worst


def exported(engine: Any, model: str) -> bool:
    """Are the weights that leave for the rollout engine those of the checkpoint, by name and value."""
    ours = {name: tensor.detach().clone() for name, tensor in engine.get_per_tensor_param()[0]}
    theirs = load_file(Path(model) / "model.safetensors")
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def faulty(rank: int, policies: str, folder: str) -> None:
    """Two stages, of which the first cannot harvest: both know, nobody waits for ever, and the log-probs are there."""
    engine = start(rank, str(Path(policies) / "qwen3"), folder, FAULTY, LAYOUTS["pp2 padded"])
    kept = attach(engine, str(Path(policies) / "qwen3"))
    if rank == 0:
        from spec_plugin_verl.backends.megatron import Taps

        def broken(self: Any, index: int) -> Any:
            def hook(*_: Any) -> None:
                self._trouble = ValueError("planted")

            return hook

        Taps._input = broken  # type: ignore[method-assign]
    data = make_batch([torch.randint(2, 300, (n,)) for n in LENGTHS], packed=False)
    with engine.eval_mode(), torch.no_grad():
        output = engine.infer_batch(data, None)
        log_probs = engine.spec_log_probs(output, data)
    found = {"failed": engine._run.session.failure, "packs": len(kept.packs), "sequences": log_probs.shape[0]}
    (Path(folder) / f"{FAULTY} {rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def places() -> list[dict[str, Any]]:
    """What verl's functions are told of a batch that lies elsewhere than the states, padded and packed."""
    from spec_plugin_verl.backends import megatron as room

    told: list[dict[str, Any]] = []

    def note(ids: torch.Tensor, **more: Any) -> tuple[None, None, None]:
        told.append({"device": ids.device.type, **more})
        return None, None, None

    def behind(*_: Any, **more: Any) -> torch.Tensor:
        told[-1] |= {"behind": more}
        return torch.zeros(1, 1)

    for kind in ("thd", "bshd"):
        setattr(room, f"preprocess_{kind}_engine", note)
        setattr(room, f"postprocess_{kind}_engine", behind)
    options = SimpleNamespace(use_remove_padding=False, pad_to_length=False)
    engine = SimpleNamespace(
        tf_config=SimpleNamespace(sequence_parallel=False, fp8=None),
        engine_config=options,
        _get_context_parallel_layout=lambda chunk: "contiguous",
    )
    ids = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(2)], layout=torch.jagged)
    batch = TensorDict({"input_ids": ids}, batch_size=[2])
    for options.use_remove_padding in (False, True):
        room.rows(engine, torch.nn.Identity(), torch.empty(5, 1, 3, device="meta"), batch)
    return told


def start(rank: int, model: str, folder: str, layout: str, what: tuple[int, dict[str, Any]]) -> Any:
    """This rank's engine."""
    ranks, options = what
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{layout.replace(' ', '-')}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    return make_engine(model, options)


def work(rank: int, policies: str, folder: str, layout: str) -> None:
    """One rank: harvest in verl's log-prob pass, and compare."""
    ranks, options = LAYOUTS[layout]
    model = str(Path(policies) / ("qwen3_moe" if layout.startswith("moe") else "qwen3"))
    share = 1 if "expert_model_parallel_size" in options else ranks  # ranks that run a batch together
    engine = start(rank, model, folder, layout, LAYOUTS[layout])
    kept = attach(engine, model)
    torch.manual_seed(0)
    ids = [torch.randint(2, 300, (n,)) for n in LENGTHS]
    data = make_batch(ids, bool(options.get("use_remove_padding")))
    with engine.eval_mode(), torch.no_grad():
        output = engine.infer_batch(data, None)
        log_probs = engine.spec_log_probs(output, data)
    (pack,) = kept.packs
    mine = [i for i in range(len(ids)) if i % share == rank % share]
    found = compared(pack, log_probs, ids, mine, model)
    failure = engine._run.session.failure
    found |= {"lengths": pack.lengths, "failed": failure, "exported": exported(engine, model)}
    masks = torch.cat([(torch.arange(LENGTHS[i]) >= LENGTHS[i] - RESPONSES[i]) for i in mine])
    found["mask"] = torch.equal(pack.loss_mask, masks)
    (Path(folder) / f"{layout} {rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _, policy, folder, *chosen = sys.argv
    for name in [name for name in chosen or LAYOUTS if name not in (FAULTY, PLACES)]:
        ranks = LAYOUTS[name][0]
        mp.start_processes(work, (policy, folder, name), nprocs=ranks, start_method="fork")
        found = [json.loads((Path(folder) / f"{name} {rank}.json").read_text()) for rank in range(ranks)]
        print("RESULT " + json.dumps([name, found]), flush=True)
    if not chosen or FAULTY in chosen:
        mp.start_processes(faulty, (policy, folder), nprocs=2, start_method="fork")
        found = [json.loads((Path(folder) / f"{FAULTY} {rank}.json").read_text()) for rank in range(2)]
        print("RESULT " + json.dumps([FAULTY, found]), flush=True)
    if not chosen or PLACES in chosen:
        print("RESULT " + json.dumps([PLACES, places()]), flush=True)
