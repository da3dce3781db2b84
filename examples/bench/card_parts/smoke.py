"""Part 0: each thing that no GPU has run yet, touched once at a tiny shape, in about two minutes; a table to paste.

The engine's items and the trainer's are done in processes of their own, so that what kills one, a kernel on a wrong address say,
leaves the rows that are there and the other. That an item ran does not say how fast it is: the other parts measure.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

from examples.bench import common
from examples.bench.card_parts.record import Record
from examples.bench.card_parts.setup import Models

TOKENS = 24
REQUESTS = 16
SELF_TEST_S = 30.0
#: seconds after which a group is ended
LIMITS_S = 240.0
#: what is said of an item as long as it has not ended
DIED = "died"
#: a correct engine's log-probs in bfloat16 are nearer on average
FAR = 0.1


@dataclass(frozen=True)
class Task:
    """What one process does."""

    models: Models
    settings: Mapping[str, Any]
    environment: Mapping[str, str]
    engine: Mapping[str, Any]  # further engine arguments


class Wrong(Exception):
    """An item ran, and what came out is wrong."""


class Items:
    """Sends a row for each item, whatever becomes of it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    @contextmanager
    def item(self, name: str) -> Iterator[dict[str, Any]]:
        """Around one item: what is put into the dictionary is shown in its row.

        An exception makes the item fail and goes no further.
        """
        seen: dict[str, Any] = {}
        began, result = time.perf_counter(), "ran"
        # until a later row says otherwise
        self._pipe.send({"item": name, "result": DIED, "seconds": None, "seen": ""})
        try:
            yield seen
        except Exception as error:
            result = "WRONG" if isinstance(error, Wrong) else "failed"
            seen["why"] = str(error) if isinstance(error, Wrong) else traceback.format_exc()[-1500:]
        said = ", ".join(f"{key} {f'{v:.3g}' if isinstance(v, float) else v}" for key, v in seen.items())
        self._pipe.send({"item": name, "result": result, "seconds": time.perf_counter() - began, "seen": said})


def measure(record: Record, models: Models) -> None:
    """Every group in its own process, one after the other."""
    cuda = record.settings["cuda"]
    groups: list[tuple[str, Callable[[Connection, Task], None], dict[str, str], dict[str, Any]]] = [
        ("engine, vLLM's own choice of model runner", engine_items, {}, {}),
        ("engine, the V1 model runner", engine_items, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, {}),
        ("actor and draft trainer", trainer_items, {}, {}),
    ]
    if cuda and torch.cuda.device_count() > 1:
        groups.append(("engine, two tensor parallel ranks", engine_items, {}, {"tensor_parallel_size": 2}))
    else:
        record.note("left out: tensor parallel ranks over NCCL, which need two cards")
    record.note(
        "left out: weight syncs over NCCL and CUDA IPC, which need a trainer: `spec-plugin conformance verl` on the card"
    )
    for group, run, environment, engine in groups:
        if not record.enough_for(20.0, group):
            continue
        for row in _rows(run, Task(models, record.settings, environment, engine), min(LIMITS_S, record.left())):
            _put(record, {"kind": "smoke", "group": group, **row})


def _put(record: Record, row: dict[str, Any]) -> None:
    """The row of an item takes the place of the one that said that it had begun."""
    rows = record.content["rows"]
    if rows and (rows[-1]["group"], rows[-1]["item"]) == (row["group"], row["item"]):
        rows.pop()
    if row["result"] == DIED:  # it has only begun
        rows.append(row)
        record.save()
    else:
        record.row(**row)


def _rows(
    run: Callable[[Connection, Task], None], task: Task, limit: float, started: Literal["spawn", "fork"] = "spawn"
) -> Iterator[dict[str, Any]]:
    """What a process sends until it ends, dies or is ended."""
    context: Any = multiprocessing.get_context(started)
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(theirs, task))  # no daemon: engines have processes of their own
    process.start()
    theirs.close()
    until = time.monotonic() + limit
    try:
        while mine.poll(max(0.0, until - time.monotonic())):
            yield mine.recv()
    except EOFError:
        return
    finally:
        process.join(10.0)
        if process.is_alive():
            process.kill()
            process.join()


# ---- the engine


def engine_items(pipe: Connection, task: Task) -> None:
    """(A process) An engine as a run has it, and everything that is done with one."""
    os.environ.update(task.environment)
    common.prepare_process(task.settings["threads"])
    asyncio.run(_engine(Items(pipe), task))


async def _engine(items: Items, task: Task) -> None:
    from examples.bench import workload
    from examples.bench.card_parts.probe import FLAG_PROBE

    started: list[Any] = []
    with items.item("start: model runner, CUDA graphs, scheduling") as seen:
        front, engine = await _start(task, FLAG_PROBE)
        started = [front, engine]
        seen |= (await engine.collective_rpc("bench_facts"))[0]
    if not started:
        return
    try:
        with items.item("self-test: verification kernels, k switched and the draft paused while requests run") as seen:
            report = await front.self_test(SELF_TEST_S)
            seen["checks"] = len(report.checks)
            if not report.passed:
                raise Wrong("; ".join(str(check) for check in report.checks if not check.passed))
        prompts = workload.addition_prompts(task.models.small, REQUESTS, seed=5)
        with items.item("greedy text, drafted and plain") as seen:
            await _greedy(seen, front, prompts, task)
        with items.item("log-probs against transformers") as seen:
            await _log_probs(seen, front, prompts, task)
        with items.item("refresh from the trainer's memory") as seen:
            await _refresh(seen, front, task)
        with items.item("sleep and wake") as seen:
            await _sleep(seen, front, engine, prompts, task)
        with items.item("sleep level 2: weights dropped, sent and refreshed") as seen:
            await _deep_sleep(seen, front, engine, prompts, task)
    finally:
        engine.shutdown()


async def _start(task: Task, extension: str) -> tuple[Any, Any]:
    from transformers import AutoTokenizer
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    from examples.bench.engines import EngineSettings, describe, engine_options, flag_front

    settings = task.settings
    asked = EngineSettings(dtype=settings["dtype"], max_num_seqs=REQUESTS, eager=settings["eager"], memory_share=0.4)
    given = {
        **engine_options(asked),
        **task.engine,
        "enable_sleep_mode": bool(current_platform.is_sleep_mode_available()),
    }
    if not settings["cuda"]:
        given["distributed_executor_backend"] = "uni"  # a worker in a process of its own spins while it waits
    target = describe(task.models.target, settings["dtype"], REQUESTS, {"temperature": 1.0})
    tokenizer = AutoTokenizer.from_pretrained(task.models.target)
    front = flag_front(
        target, task.models.draft, settings["k"], tokenizer, spec={"sleep_level": 2, "full_graphs": True}
    )
    arguments = {**given, **front.engine_arguments(given, extension)}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(task.models.target), **arguments))
    front.engine = engine
    await front.look_at_draft()
    return front, engine


async def _sampled(front: Any, prompts: Any, k: int, temperature: float) -> list[Any]:
    from spec_plugin.engine.selftest.probe import Probe, gather_or_cancel
    from spec_plugin.events import Schedule

    await front.set_schedule(Schedule((k,) * (REQUESTS + 1)))
    probe = Probe(front.engine, {"temperature": temperature}, REQUESTS)
    params = probe.params(TOKENS, plain=False, logprobs=0)
    found: list[Any] = await gather_or_cancel([probe.sample(i, prompt, params) for i, prompt in enumerate(prompts)])
    return found


def _compare(seen: dict[str, Any], before: list[Any], after: list[Any], otherwise: str) -> None:
    """Greedy text twice; ties that rounding turns are a few.

    Raises:
        Wrong: ``otherwise``, if most of it differs.
    """
    same = sum(list(a.tokens) == list(b.tokens) for a, b in zip(before, after, strict=True))
    seen["the same text"] = f"{same} of {len(before)}"
    if same < len(before) / 2:
        raise Wrong(otherwise)


async def _greedy(seen: dict[str, Any], front: Any, prompts: Any, task: Task) -> None:
    plain, drafted = [await _sampled(front, prompts, k, 0.0) for k in (0, task.settings["k"])]
    _compare(seen, plain, drafted, "most of the text is another one with drafts")


async def _log_probs(seen: dict[str, Any], front: Any, prompts: Any, task: Task) -> None:
    from examples.bench.card_parts.score import Scorer

    sampled = await _sampled(front, prompts, task.settings["k"], 1.0)
    scorer = Scorer(task.models.target, task.settings["dtype"], "cuda" if task.settings["cuda"] else "cpu")
    scored = scorer.score([(prompt, list(s.tokens)) for prompt, s in zip(prompts, sampled, strict=True)], 1.0)
    apart = (torch.tensor([list(s.logprobs) for s in sampled]) - torch.tensor(scored)).abs()
    seen |= {"mean": float(apart.mean()), "most": float(apart.max())}
    if not float(apart.mean()) < FAR:
        raise Wrong(f"on average {float(apart.mean()):.3g} nats apart")


async def _refresh(seen: dict[str, Any], front: Any, task: Task) -> None:
    from draft_training import DraftTrainer, TrainSettings, fingerprint, load_draft
    from spec_plugin.events import DraftRefresh

    config, tensors = load_draft(task.models.draft)
    device = "cuda" if task.settings["cuda"] else "cpu"
    trainer = DraftTrainer(config, TrainSettings(), device=device, seed=0, tensors=tensors)
    sent = trainer.engine_tensors(getattr(torch, task.settings["dtype"]))
    report = await front.install_tensors(DraftRefresh(1, 1, sent, fingerprint(sent)), force=True)
    seen |= {phase: f"{ms:.1f} ms" for phase, ms in report.phases.items()} | {"bytes crossed": report.crossed}
    if not report.installed:
        raise Wrong(report.reason)


async def _sleep(seen: dict[str, Any], front: Any, engine: Any, prompts: Any, task: Task) -> None:
    before = await _sampled(front, prompts, task.settings["k"], 0.0)
    await front.set_schedule(front.schedule.confirmed)  # nothing runs from here on
    awake = (await engine.collective_rpc("bench_memory"))[0]
    await engine.sleep(level=1)
    asleep = (await engine.collective_rpc("bench_memory"))[0]
    await engine.wake_up()
    lost = any(await engine.collective_rpc("spec_lost_draft"))
    after = await _sampled(front, prompts, task.settings["k"], 0.0)
    used = "card_used" if task.settings["cuda"] else "now"
    seen |= {"MiB awake": awake[used], "asleep": asleep[used]}
    if lost:
        raise Wrong("the draft was lost")
    _compare(seen, before, after, "the text is another one afterwards")


async def _deep_sleep(seen: dict[str, Any], front: Any, engine: Any, prompts: Any, task: Task) -> None:
    before = await _sampled(front, prompts, task.settings["k"], 0.0)
    await engine.collective_rpc("bench_keep_target")
    await engine.sleep(level=2)
    await engine.wake_up(["weights"])
    await engine.collective_rpc("bench_restore_target")
    await _refresh({}, front, task)
    await engine.wake_up(["kv_cache"])
    after = await _sampled(front, prompts, task.settings["k"], 0.0)
    _compare(seen, before, after, "the text is another one afterwards")


# ---- the trainer


def trainer_items(pipe: Connection, task: Task) -> None:
    """(A process) What the flag does in the actor: hidden states, and the training of a draft on them."""
    common.prepare_process(task.settings["threads"])
    items = Items(pipe)
    device = "cuda" if task.settings["cuda"] else "cpu"
    hidden: list[Any] = []
    with items.item("the actor's hidden states") as seen:
        hidden.append(_harvested(seen, task, device))
    with items.item("attention of the draft's unroll in a fused kernel") as seen:
        _attention(seen, task, device)
    with items.item("training a draft, its copies in the host's memory between slices") as seen:
        _trained(seen, task, device, hidden)


def _harvested(seen: dict[str, Any], task: Task, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    from draft_training.config import default_aux_layers
    from examples.bench import harvest, workload
    from spec_plugin.actor.decoder import find_decoder
    from spec_plugin.actor.taps import Taps

    model: Any = AutoModelForCausalLM.from_pretrained(task.models.small, dtype=torch.float32).to(device).eval()
    prompts = workload.addition_prompts(task.models.small, REQUESTS, seed=9)
    width = min(map(len, prompts))
    ids = torch.tensor([prompt[:width] for prompt in prompts], device=device)
    taps = Taps.of(find_decoder(model), default_aux_layers(model.config.num_hidden_layers))
    with taps.attached(), torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    hidden = harvest.take(taps, ids)
    with torch.no_grad():
        again = model.lm_head(hidden.last.to(device))
    apart = float((again - logits.reshape(-1, logits.shape[-1])).abs().max())
    seen |= {"tokens": len(hidden.input_ids), "logits of the kept states apart": apart}
    if not apart < 1e-2:
        raise Wrong("the states that were kept are not those of the pass")
    return hidden, model


def _attention(seen: dict[str, Any], task: Task, device: str) -> None:
    from draft_training import load_draft
    from draft_training.attention import proven_kernel
    from draft_training.card import fast_products
    from draft_training.fused_attention import kernel_for

    where = torch.empty(0, device=device).device  # with its index, as a tensor says it
    head_dim = load_draft(task.models.draft)[0].head_dim
    for dtype in (torch.float32, torch.bfloat16):
        with fast_products(where):
            kernel = proven_kernel(where, dtype, head_dim)
        seen[str(dtype).removeprefix("torch.")] = "explicit scores" if kernel is None else kernel.name
        if kernel is None and kernel_for(where.type, dtype, head_dim):
            raise Wrong(
                f"{dtype}, heads of {head_dim}: the fused kernel is not right here, explicit scores serve (see the warning)"
            )


def _trained(seen: dict[str, Any], task: Task, device: str, hidden: list[Any]) -> None:
    from draft_training import DraftConfig, DraftTrainer, HiddenBuffer, TrainSettings
    from spec_plugin.builtin.trainer import documents_of

    if not hidden:
        raise RuntimeError("there are no hidden states")
    states, model = hidden[0]
    config = DraftConfig.from_target(json.loads((Path(task.models.small) / "config.json").read_text()))
    trainer = DraftTrainer(config, replace(TrainSettings(), offload=True), device=device, seed=0)
    trainer.update_policy(model.get_input_embeddings().weight, model.lm_head.weight, 0)
    buffer = HiddenBuffer(1 << 20, 1 << 30, seed=0)
    for document in documents_of(states):
        buffer.add(document)
    first = trainer.train_slice(buffer, 60.0, 1)
    later = trainer.train_slice(buffer, 60.0, 20)
    seen |= {"steps": later.steps, "loss": f"{first.loss:.3f} to {later.loss:.3f}"}
    if not later.loss < first.loss:
        raise Wrong("its loss does not fall")
