"""Part 0: each thing of an engine that no GPU has run yet, touched once at a tiny shape; a table to paste.

Each engine lives in a process of its own, so that what kills one, a kernel on a wrong address say, leaves the rows that are
there. That an item ran does not say how fast it is: the other parts measure.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import MappingProxyType
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
    """An engine for each way of running one, one after the other."""
    run_group(record, models, "engine, vLLM's own choice of model runner", engine_items)
    ran = record.content["rows"]
    if any("runner V1," in row["seen"] for row in ran):
        record.note("left out: the V1 model runner once more, which is what vLLM chose")
    else:
        run_group(record, models, "engine, the V1 model runner", engine_items, {"VLLM_USE_V2_MODEL_RUNNER": "0"})
    if record.settings["cuda"] and torch.cuda.device_count() > 1:
        two = {"tensor_parallel_size": 2}
        run_group(record, models, "engine, two tensor parallel ranks", engine_items, engine=two)
    else:
        record.note("left out: tensor parallel ranks over NCCL, which need two cards")
    record.note(
        "left out: weight syncs over NCCL and CUDA IPC, which need a trainer: `spec-plugin conformance verl` on the card"
    )


def run_group(
    record: Record,
    models: Models,
    group: str,
    run: Callable[[Connection, Task], None],
    environment: Mapping[str, str] = MappingProxyType({}),
    engine: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """A row for each item of one process.

    Args:
        record: of the part.
        models: what it works on.
        group: name in the rows.
        run: what the process does.
        environment: further variables of it.
        engine: further engine arguments.
    """
    if record.enough_for(20.0, group):
        task = Task(models, record.settings, dict(environment), dict(engine))
        for row in _rows(run, task, min(LIMITS_S, record.left())):
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
    until, last = time.monotonic() + limit, {}
    try:
        while mine.poll(max(0.0, until - time.monotonic())):
            last = mine.recv()
            yield last
    except EOFError:
        return
    else:
        if last.get("result") == DIED:
            yield {**last, "result": "unfinished", "seen": f"ended with its group after {limit:.0f} s"}
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
    kv = 1.0 if settings["cuda"] else None  # GiB, so that it can run beside another part
    asked = EngineSettings(
        dtype=settings["dtype"], max_num_seqs=REQUESTS, eager=settings["eager"], memory_share=0.1, kv_gib=kv
    )
    given = {
        **engine_options(asked),
        **task.engine,
        "enable_sleep_mode": bool(current_platform.is_sleep_mode_available()),
    }
    if not settings["cuda"]:
        given["distributed_executor_backend"] = "uni"  # a worker in a process of its own spins while it waits
    target = describe(task.models.target, settings["dtype"], REQUESTS, {"temperature": 1.0})
    tokenizer = AutoTokenizer.from_pretrained(task.models.target)
    front = flag_front(target, task.models.draft, settings["k"], tokenizer, spec={"sleep_level": 2})
    arguments = {**given, **front.engine_arguments(given, extension)}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(task.models.target), **arguments))
    front.engine = engine
    await front.look_at_draft()
    return front, engine


async def _sampled(front: Any, prompts: Any, k: int, temperature: float) -> list[Any]:
    from spec_plugin.api.events import Schedule
    from spec_plugin.engine.selftest.probe import Probe, gather_or_cancel

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
    from spec_plugin.api.events import DraftRefresh

    config, tensors = load_draft(task.models.draft)
    device = "cuda" if task.settings["cuda"] else "cpu"
    trainer = DraftTrainer(config, TrainSettings(), device=device, seed=0, tensors=tensors)
    sent = trainer.engine_tensors(getattr(torch, task.settings["dtype"]))
    report = await front.install_tensors(DraftRefresh(1, 1, sent, fingerprint(sent)), force=True)
    seen["took"] = f"{report.milliseconds:.1f} ms"
    if not report.installed:
        raise Wrong(report.reason)


async def _sleep(seen: dict[str, Any], front: Any, engine: Any, prompts: Any, task: Task) -> None:
    before = await _sampled(front, prompts, task.settings["k"], 0.0)
    await front.set_schedule(front.schedule.confirmed)  # nothing runs from here on
    awake = (await engine.collective_rpc("bench_memory"))[0]
    await engine.sleep(level=1)
    asleep = (await engine.collective_rpc("bench_memory"))[0]
    await engine.wake_up()
    lost = any(await engine.collective_rpc("bench_lost_draft"))
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
