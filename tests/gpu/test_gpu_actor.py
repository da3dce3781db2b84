"""What runs in an actor's process on its card: the hidden states' tap, the guard of exactness, streams, random numbers, ranks."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from builders.exactness import TARGET, guard_of
from on_card import DEVICE, DTYPE, HERE, K

from draft_training.parallel import Ranks
from examples.bench.workload import harvest
from spec_plugin import SpecConfig
from spec_plugin.api import ranks
from spec_plugin.api.diagnosis import device_type
from spec_plugin.api.events import WeightSync
from spec_plugin.lifecycle.blocking import callers_stream, run_blocking
from spec_plugin.plan.model_runner import runner_of
from spec_plugin.policy import online_training
from spec_plugin.policy.exactness.statistics import log_law
from spec_plugin.policy.online_training import TRAIN_TOKENS
from spec_plugin.trainer.decoder import find_decoder
from spec_plugin.trainer.evidence import MOST, ON_CARD, tokens_of_a_turn
from spec_plugin.trainer.harvest import harvested, responses_at_the_end
from spec_plugin.trainer.harvest_plan import HarvestPlan
from spec_plugin.trainer.rank_engines import random_streams_kept
from spec_plugin.trainer.taps import Taps

pytestmark = pytest.mark.gpu


def rows(count: int = 6, length: int = 40) -> list[tuple[list[int], list[int]]]:
    tokens = torch.randint(2, 300, (count, length), generator=torch.Generator().manual_seed(5)).tolist()
    return [(row[:8], row[8:]) for row in tokens]


def test_hidden_states_of_a_pass_on_the_card_are_those_of_a_cpu_and_lie_in_pinned_host_memory(target, policy, config):
    from transformers import AutoModelForCausalLM

    on_cpu = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tolerance = 0.05 if torch.bfloat16 == DTYPE else 1e-4
    found, expected = (harvest(model, rows(), config.aux_layers) for model in (policy, on_cpu))
    for here, there in zip(found, expected, strict=True):
        assert torch.equal(here.input_ids, there.input_ids) and torch.equal(here.loss_mask, there.loss_mask)
        for name in ("aux", "last"):
            state, right = getattr(here, name).float(), getattr(there, name)
            assert state.device.type == "cpu" and float((state - right).norm() / right.norm()) < tolerance


def test_a_harvest_takes_pinned_memory_and_leaves_nothing_on_the_card(policy, config):
    taps, documents = Taps.of(find_decoder(policy), config.aux_layers), rows(2)
    ids = [torch.tensor(prompt + response) for prompt, response in documents]
    masks = responses_at_the_end(ids, [len(response) for _, response in documents])
    with torch.no_grad(), taps.attached():
        policy.model(input_ids=torch.stack(ids).to(DEVICE), use_cache=False)
        before = torch.cuda.memory_allocated() if HERE else 0
        hidden = harvested(taps, (ids, masks), HarvestPlan(1 << 30))
    assert hidden is not None and hidden.last.is_pinned() == hidden.aux.is_pinned() == HERE
    taps.forget()
    assert not HERE or torch.cuda.memory_allocated() < before, "the states were let go"


def test_the_guard_of_exactness_finds_on_the_card_what_it_finds_on_a_cpu():
    """The policy's head rests in pinned memory, and is read on the card in larger parts."""
    generator = torch.Generator().manual_seed(6)
    head, last = torch.randn(9_000, 32, generator=generator), torch.randn(50, 32, generator=generator)
    tokens = torch.randint(9_000, (50,), generator=generator)
    found = {}
    for kind, device in (("cpu", torch.device("cpu")), (DEVICE.type, DEVICE)):
        guard: Any = guard_of(replace(TARGET, device_type=kind, hf_config={**TARGET.hf_config, "vocab_size": 9_000}))
        for version in (0, 1):  # the second one into the same memory
            guard._follow(WeightSync(version, head.to(device), head.to(device)))
        assert guard._head.device.type == "cpu" and guard._head.is_pinned() == (device.type == "cuda")
        found[device] = guard._values(last, tokens)
    for here, there in zip(found[DEVICE], found[torch.device("cpu")], strict=True):
        torch.testing.assert_close(here, there, atol=1e-4, rtol=1e-4)
    law = log_law(last.to(DEVICE), head.to(DEVICE), 1.0, None)
    torch.testing.assert_close(law.exp().sum(-1).cpu(), torch.ones(50), atol=1e-4, rtol=0)


def test_a_thread_that_goes_on_with_the_callers_work_is_on_the_callers_stream():
    """Also from under a running event loop, where a coroutine gets a thread of its own."""

    async def stream() -> Any:
        return torch.cuda.current_stream() if HERE else None

    async def asked() -> Any:
        return run_blocking(stream())

    if not HERE:
        assert asyncio.run(asked()) is None
        with callers_stream()():
            return
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.ones(1, device=DEVICE)  # the device is in use
        assert asyncio.run(asked()) == side
        with callers_stream()():
            assert torch.cuda.current_stream() == side
    assert float(x) == 1.0 and asyncio.run(asked()) == torch.cuda.current_stream()


def test_law_1_a_block_gives_the_random_numbers_of_the_card_back():
    def draws() -> tuple[Any, ...]:
        return random.random(), torch.rand(3).tolist(), torch.rand(3, device=DEVICE).tolist()

    torch.manual_seed(7)
    random.seed(7)
    expected = draws()
    torch.manual_seed(7)
    random.seed(7)
    with random_streams_kept():
        draws()
    assert draws() == expected


def test_sizes_of_a_run_are_those_of_its_device(config):
    assert device_type() == DEVICE.type
    embed = torch.zeros(2, 2)  # as a sync through the host's memory brings it
    where = online_training._device(replace(TARGET, device_type=DEVICE.type), embed)
    assert where.type == DEVICE.type and where.index == (torch.cuda.current_device() if HERE else None)
    assert TRAIN_TOKENS[where.type] == (8192 if HERE else 512)
    turn = tokens_of_a_turn(replace(TARGET, device_type=DEVICE.type))
    assert turn == (ON_CARD, 1) if HERE else turn[0] <= MOST


def test_the_actors_draft_trainer_rests_between_slices_on_a_card_alone(policy):
    """By the hooks, as in a run: a weight sync makes it where the actor computes, wherever the weights were sent from."""
    from builders.training import plugin, sync

    hook = plugin(k=K)
    training: Any = next(p for p in hook.spec_weight_sync.get_hookimpls() if "DraftTraining" in repr(p.plugin)).plugin
    training._target = replace(training._target, device_type=DEVICE.type)
    hook.spec_weight_sync(event=sync(0))
    trainer = training._trainer
    assert trainer.device.type == DEVICE.type and trainer.settings.offload == HERE
    assert trainer.settings.tokens_per_step == TRAIN_TOKENS[DEVICE.type]


def test_where_a_card_has_no_room_for_vllms_sampler_nothing_is_drafted_and_proposals_are_greedy():
    from builders.controller import chosen, controller
    from builders.session import TARGET as SERVED

    from spec_plugin.api.speculation import Reason
    from spec_plugin.methods.sample_method import draft_sample_method

    many = replace(SERVED, hf_config={"vocab_size": 1 << 40}, max_num_seqs=1, device_type=DEVICE.type)
    config = SpecConfig.parse({"k": K, "serve": "always"})
    judge = controller({8: 2.0}, serve="always")
    judge.spec_configure(config, many, judge._method)
    assert (chosen(judge)[1] == Reason.NO_ROOM) == HERE
    few = replace(SERVED, hf_config={"vocab_size": 512}, max_num_seqs=1, device_type=DEVICE.type)
    found = [draft_sample_method(config, target, "eagle3") for target in (few, many)]
    # V1 keeps no logits
    assert found == [
        "probabilistic",
        "greedy" if HERE and runner_of({"method": "eagle3"}, "cuda").v2 else "probabilistic",
    ]


def test_openrlhfs_adapter_asks_vllm_for_the_device():
    pytest.importorskip("vllm")
    from spec_plugin_openrlhf.options import _device_type

    assert _device_type() == DEVICE.type


# ---- ranks


def _rank(number: int, store: str, answers: Any) -> None:
    """(A process) One of two ranks, each with a card: the trainer's group is NCCL's, ours for tensors is a second one of them."""
    device = torch.device("cuda", number) if HERE else torch.device("cpu")
    if HERE:
        torch.cuda.set_device(device)
    backend = "nccl" if HERE else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=number, world_size=2, timeout=timedelta(seconds=60)
    )
    group = ranks.actor_group()
    added = Ranks(group, device).add_up(torch.full((3,), float(number + 1), device=device))
    agreed = ranks.on_any_rank(number == 1)
    answers.put((number, added.tolist(), list(agreed), dist.get_backend(group)))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(HERE and torch.cuda.device_count() < 2, reason="NCCL needs a card for each of two ranks")
def test_ranks_on_cards_add_up_by_nccl_and_agree_by_gloo(tmp_path: Path):
    context: Any = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=_rank, args=(n, str(tmp_path / "store"), answers)) for n in (0, 1)]
    for process in processes:
        process.start()
    found = sorted(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(30)
    backend = "nccl" if HERE else "gloo"
    assert found == [(n, [3.0] * 3, [True], backend) for n in (0, 1)]
