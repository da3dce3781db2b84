"""Data-parallel draft training on two gloo processes."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from builders.drafts import TINY, make_document, make_policy

from draft_training import DraftConfig, DraftTrainer, HiddenBuffer, TrainSettings, digest

SETTINGS = TrainSettings(tokens_per_step=400, warmup_steps=1, ttt_steps=2, replay_share=0.0, lr=1e-3)


def documents(pruned: bool):
    return [make_document(14 + i, i + 100 * pruned) for i in range(6)]


def fill(docs) -> HiddenBuffer:
    b = HiddenBuffer(10_000, 1 << 30, 0)
    for d in docs:
        b.add(d)
    return b


def scenario(rank: int | None, group, pruned: bool):
    """Both ranks together must equal one process with all documents; rank None is that one process."""
    config = DraftConfig.from_target(TINY, draft_vocab_size=12 if pruned else None)
    docs = documents(pruned)
    mine = docs if rank is None else docs[rank * 4 : 4 + rank * 2]  # uneven: four documents and two
    t = DraftTrainer(config, SETTINGS, device="cpu", seed=5 + (rank or 0), process_group=group)
    if rank is None or rank == 0:
        first = digest(t.engine_tensors())
    t.update_policy(*make_policy(), 1)
    report = t.train_slice(fill(mine), 60, 3)
    evaluated = t.evaluate(mine)
    return t, (report, evaluated, first if rank in (None, 0) else None)


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
    group = dist.group.WORLD
    out = {}
    for pruned in (False, True):
        t, (report, evaluated, _) = scenario(rank, group, pruned)
        out[pruned] = (t.engine_tensors(), report, evaluated)
    # one rank without documents takes part; none at all stops together
    t, _ = scenario(rank, group, False)
    lonely = t.train_slice(fill(documents(False) if rank == 0 else []), 60, 2)
    nobody = t.train_slice(fill([]), 60, 2)
    # the rank that has run out of time stops the other
    late = t.train_slice(fill(documents(False)), 0.0 if rank == 1 else 60, 5)
    # NaN on one rank: skipped by both
    if rank == 1:
        t._lm_head.fill_(float("nan"))
    before = digest(t.engine_tensors())
    poisoned = t.train_slice(fill(documents(False)), 60, 2)
    out["rest"] = (lonely, nobody, late, poisoned, before == digest(t.engine_tensors()), before)
    torch.save(out, os.path.join(folder, f"{rank}.pt"))
    dist.destroy_process_group()


def test_two_ranks_train_one_draft_as_one_process_would(tmp_path):
    # a fork spares two imports of torch; with CUDA, autograd forbids it
    method = "spawn" if torch.cuda.is_available() else "fork"
    mp.start_processes(worker, (str(tmp_path),), nprocs=2, start_method=method)
    a, b = (torch.load(tmp_path / f"{r}.pt", weights_only=False) for r in (0, 1))
    for pruned in (False, True):
        alone, (report, evaluated, _) = scenario(None, None, pruned)
        assert digest(a[pruned][0]) == digest(b[pruned][0])  # bit by bit the same on both ranks
        for name, tensor in alone.engine_tensors().items():
            torch.testing.assert_close(a[pruned][0][name], tensor, rtol=1e-3, atol=1e-5)
        for rank in (a, b):
            assert rank[pruned][1].steps == report.steps == 3 and rank[pruned][1].tokens == report.tokens
            assert rank[pruned][1].rounds == report.rounds and abs(rank[pruned][1].loss - report.loss) < 1e-3
            assert rank[pruned][2].rounds == evaluated.rounds
    for rank in (a, b):
        lonely, nobody, late, poisoned, unchanged, version = rank["rest"]
        assert (lonely.steps, nobody.steps, late.steps) == (2, 0, 0)
        assert (poisoned.steps, poisoned.skipped) == (0, 2) and unchanged
        assert version == a["rest"][5]
