"""Two ranks of a gloo group, each a process."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

WAIT = 120  # seconds; a rank that waits for the other one for ever fails the test


def on_two_ranks(tmp_path: Any, work: Callable[[int], Any]) -> list[Any]:
    """What ``work(rank)`` returns on each of two forked ranks of a gloo group."""
    torch.optim.AdamW([torch.zeros(1)])  # what it imports at first use is imported once, not in each rank
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
        try:
            answers.put((rank, work(rank)))
        except Exception as error:
            answers.put((rank, error))
        dist.barrier()
        dist.destroy_process_group()

    ranks = [context.Process(target=run, args=(rank,), daemon=True) for rank in (0, 1)]
    for process in ranks:
        process.start()
    try:
        found = dict(answers.get(timeout=WAIT) for _ in ranks)
    except queue.Empty:
        pytest.fail("a rank waits for the other one")
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    return [found[0], found[1]]
