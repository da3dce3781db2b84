"""What the bookkeeping of a step costs rank 0 and an engine's front as responses and engines grow; another build beside it.

Each part is the project's own code, driven with what a trainer and engines of that size would hand it: a part in a process of
its own, by its CPU time. Tensors are as wide as at 8B where their width costs something on the host, else narrow. Of the
earlier build, a part that would take longer than --limit is measured at fewer requests and multiplied, and is marked so.

    python examples/bench/scale.py --before ../another-checkout --out runs/bench
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RANKS, VOCABULARY, HIDDEN, K, PROMPT, PHASES, STEPS = 64, 151_936, 4096, 8, 256, 1000, 16


@dataclass(frozen=True)
class Size:
    """Engines, requests of each in a step, and most tokens of a response."""

    engines: int
    requests: int
    tokens: int

    @property
    def rows(self) -> int:
        """Sequences that rank 0 trains on."""
        return max(1, self.engines * self.requests // (RANKS if self.engines > 1 else 1))

    @property
    def name(self) -> str:
        return f"{self.engines} x {self.requests} x {self.tokens}"


SIZES = (Size(1, 48, 48), Size(16, 1024, 1024), Size(16, 1024, 4096), Size(16, 1024, 16_384))


class Clock:
    """CPU seconds of the blocks that are timed; what is left out when they have taken too long is extrapolated."""

    def __init__(self, limit: float) -> None:
        self.limit, self.seconds, self.extrapolated = limit, 0.0, False

    @contextmanager
    def running(self) -> Any:
        began = time.process_time()
        yield
        self.seconds += time.process_time() - began

    def each(self, count: int, work: Callable[[int], None]) -> None:
        """``work`` so often, or as often as there is time for; then as much more as is missing."""
        before = self.seconds
        for i in range(count):
            work(i)
            spent = self.seconds - before
            if spent > self.limit and i + 1 < count:
                self.seconds, self.extrapolated = before + spent * count / (i + 1), True
                return


def lengths_of(size: Size, count: int, seed: int = 0) -> list[int]:
    """Of responses: log-normal, cut at the longest, about half of it in the mean."""
    draw = random.Random(seed)
    return [min(size.tokens, max(8, int(draw.lognormvariate(math.log(0.45 * size.tokens), 0.6)))) for _ in range(count)]


# ------------------------------------------------------------------------------------------------ the parts


def _unlike(batch: float, k: int, seconds: float, drafted: int, context: float) -> Any:
    """Three steps that were not alike, in which so many requests drafted."""
    from spec_plugin.api import events

    if hasattr(events, "MixedSteps"):  # of an earlier build
        return events.MixedSteps(batch, k, False, 3 * seconds, 3, drafted, context)
    return events.StepTiming(batch, k, False, seconds, 3, context, drafted=drafted, alike=False)


def controller(size: Size, clock: Clock, stage: str = "controller") -> None:
    """Rank 0: all that the controller does in a step of a synchronous run, late in it."""
    from spec_plugin.api.config import SpecConfig
    from spec_plugin.api.events import RolloutStats, SelfTestReport, StepTiming, TargetInfo
    from spec_plugin.api.method import Method
    from spec_plugin.policy.break_even.controller import BreakEvenController
    from spec_plugin.trainer.links import merge_stats

    try:
        from spec_plugin.step_cost.bands import band_of

        batches = sorted({band_of(b) for b in range(1, size.requests + 1)})
    except ImportError:  # a build that counts by the request
        batches = list(range(1, size.requests + 1))

    def seconds(batch: float, k: int) -> float:
        return 0.01 + 2e-5 * batch * (k + 1) + 3e-4 * k

    rng, run = random.Random(0), BreakEvenController()
    target = TargetInfo(
        "x",
        {"vocab_size": VOCABULARY, "hidden_size": HIDDEN},
        "bfloat16",
        device_type="cuda",
        max_num_seqs=size.requests,
    )
    run.spec_configure(SpecConfig.parse({"k": K}), target, Method("eagle3", {}))
    kinds = [(b, k, k == 0) for b in (1, 8, 32, 128) for k in (0, 1, 3, K)] + [(b, 0, False) for b in (1, 8, 32, 128)]
    run.spec_engine_ready(
        SelfTestReport((), 1.0, tuple(StepTiming(*kind, seconds(*kind[:2]), 16, 50.0) for kind in kinds))
    )
    run.acceptance_estimate.predicted((0.8, 0.75, 0.7))
    run.states.tried = True
    for phase in range(PHASES if len(batches) < 200 else 10):  # ten of them have brought the older build to its size
        k = phase % (K + 1)
        run.cost.observe([StepTiming(b, k, k == 0, seconds(b, k), 16, 0.5 * size.tokens) for b in batches])
    table = run.spec_schedule(0).table

    def report(engine: int) -> RolloutStats:
        ks = [(b, table[min(len(table) - 1, math.ceil(b))]) for b in batches]
        context, plain = 0.5 * size.tokens, not any(table)
        took = [seconds(b, k) * rng.uniform(0.97, 1.03) for b, k in ks]
        alike = tuple(StepTiming(b, k, plain, s, 40, context) for (b, k), s in zip(ks, took, strict=True))
        mixed = tuple(_unlike(b, k, s, int(2 * b) * (k > 0), context) for (b, k), s in zip(ks, took, strict=True))
        n = int(sum(t.batch * t.steps for t in alike if t.k))
        per_position = tuple(int(n * share) for share in (0.8, 0.6, 0.4, 0.3, 0.2, 0.1, 0.1, 0.05))
        steps = {"steps": alike + mixed} if isinstance(mixed[0], StepTiming) else {"steps": alike, "mixed": mixed}
        return RolloutStats(
            1, size.requests, size.requests * size.tokens, 100.0, n, 3 * n, sum(per_position), per_position,
            busy_seconds=95.0 + engine, **steps,
        )  # fmt: skip

    sent = [pickle.dumps(report(engine)) for engine in range(size.engines)]
    told = getattr(run, "times_as_long_without", None) or run.spec_slowdown_without_drafts
    at_most = getattr(run, "times_as_long_at_most", None) or getattr(run, "spec_max_slowdown_without_drafts", None)
    start = run.head_start if hasattr(run, "head_start") else run.spec_head_start
    overlapping = stage == "overlapping"
    for _ in range(2 if len(batches) < 200 else 1):  # the first one finds the caches of a process cold
        began = clock.seconds
        with clock.running() if stage == "merging" else nullcontext():
            stats = merge_stats([pickle.loads(part) for part in sent])
        engines = stats.parts or (stats,)
        with clock.running() if stage == "controller" else nullcontext():
            run.spec_rollout_end(stats)
            told(max(engines, key=lambda engine: engine.busy_seconds))
        with clock.running() if overlapping else nullcontext():
            for engine in engines if at_most is not None else ():
                at_most(engine)
        with clock.running() if stage == "controller" else nullcontext():
            start()
            run.spec_metrics()
            run.spec_schedule(1)
        clock.seconds -= began


def merging(size: Size, clock: Clock) -> None:
    """Rank 0: unpickling and merging what the engines report of a step."""
    controller(size, clock, "merging")


def overlapping(size: Size, clock: Clock) -> None:
    """Rank 0, asynchronous trainers alone: what each engine's steps would have taken at most without drafts."""
    controller(size, clock, "overlapping")


def front(size: Size, clock: Clock) -> None:
    """One engine's front: what is noted of each request, its log-probs among it, beside vLLM's own work."""
    import numpy as np

    from spec_plugin.engine.flight import RequestTracker

    tracker, rng, prompt = RequestTracker(), np.random.default_rng(0), list(range(PROMPT))

    def one(i: int) -> None:
        n = lengths[i]
        response, log_probs = rng.integers(0, VOCABULARY, n).tolist(), (-rng.random(n)).tolist()
        with tracker.request(1) as request, clock.running():
            request.completed(response, 1, log_probs, asked=True)
            tracker.completed(request, prompt, 1, True)

    lengths = lengths_of(size, size.requests)
    clock.each(size.requests, one)


def spans(size: Size, clock: Clock) -> None:
    """Rank 0: taking in what all engines say of who sampled what, and finding it for its own rows."""
    import numpy as np
    import torch

    from spec_plugin.api.spans import Span, Spans
    from spec_plugin.engine.flight import RequestTracker

    tracker, rng, held, prompt = RequestTracker(), np.random.default_rng(0), Spans(), list(range(PROMPT))
    lengths = lengths_of(size, size.rows)
    documents, stated = [], []
    for n in lengths:
        response = rng.integers(0, VOCABULARY, n).tolist()
        with tracker.request(1) as request:
            pass
        log_probs = (-rng.exponential(size=n)).tolist()
        request.completed(response, 1, log_probs)
        tracker.completed(request, prompt, 1, True)
        documents.append(torch.tensor(prompt + response))
        stated.append(torch.tensor(log_probs))
    mine = tracker.take_spans()
    shape = mine[0]
    others = size.engines * size.requests - len(mine)
    first, *rest = shape.__dataclass_fields__

    def of_others(version: int) -> list[Span]:
        fields = {name: getattr(shape, name) for name in rest} | {"version": version}
        return [Span(**{first: int(mark)}, **fields) for mark in rng.integers(1, 2**62, others)]

    for version in range(STEPS):  # before this one, as a run that is under way has seen
        held.add(of_others(version), version)
    all_of_them = [replace(span, version=STEPS) for span in mine] + of_others(STEPS)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    rollout = torch.nn.utils.rnn.pad_sequence(stated, batch_first=True)
    with clock.running():
        held.add(all_of_them, STEPS)
        found = held.of(documents, [PROMPT] * len(documents), mask, rollout=rollout)
    assert bool((found.versions[mask] == STEPS).all()) and not found.apart.any()


def guard(size: Size, clock: Clock) -> None:
    """Rank 0: the log-probs of its rows against the engines', before they enter the loss."""
    import torch

    from spec_plugin.api.config import SpecConfig
    from spec_plugin.api.events import Drafts, LogprobBatch, TargetInfo
    from spec_plugin.policy.provenance import ProvenanceGuard

    judge = ProvenanceGuard()
    judge.spec_configure(SpecConfig.parse({}), TargetInfo("", {}, "bfloat16"))
    lengths, generator = torch.tensor(lengths_of(size, size.rows)), torch.Generator().manual_seed(0)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    recomputed = -1.0 - torch.rand(mask.shape, generator=generator)
    drafted = torch.full(mask.shape, int(Drafts.ON), dtype=torch.uint8)
    drafted[::50, :64] = int(Drafts.CONTROL)
    rollout = recomputed + 0.01 * torch.randn(mask.shape, generator=generator)
    batch = LogprobBatch(1, recomputed, rollout, mask, torch.ones(mask.shape, dtype=torch.int64), drafted, False)
    with clock.running():
        judge.spec_check_logprobs(batch)


#: steps, of which each rank has chosen tokens in one, at these sizes
_TURNS = 4


def evidence(size: Size, clock: Clock) -> None:
    """Rank 0: choosing tokens of its rows, finding them again, and their distributions over the vocabulary; mean of a step."""
    import torch
    from torch import nn

    try:
        from spec_plugin.trainer.evidence import EvidenceTap
    except ImportError:
        return  # of a build before it
    from spec_plugin.api.config import SpecConfig
    from spec_plugin.api.events import Drafts, LogprobBatch, RolloutStats, TargetInfo, WeightSync
    from spec_plugin.lifecycle.manager import create_manager
    from spec_plugin.lifecycle.session import SpecSession
    from spec_plugin.trainer.harvest import DecoderHarvest
    from spec_plugin.trainer.spec_run import SpecRun

    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 12_288, "num_hidden_layers": 36}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960}
    target = TargetInfo("/nowhere", {"model_type": "qwen3", **sizes, **heads}, "bfloat16", actor_dtype="bfloat16")
    session = SpecSession(SpecConfig(), target, create_manager(("trainer", "provenance"), load_entry_points=False))
    decoder: Any = nn.Module()
    decoder.layers, decoder.norm = nn.ModuleList([nn.Identity() for _ in range(36)]), nn.Identity()
    harvest = SpecRun(session, None, lambda run: DecoderHarvest(run, lambda: decoder)).harvest
    tap, generator = EvidenceTap(harvest, session), torch.Generator().manual_seed(0)
    lengths = lengths_of(size, size.rows)
    documents = [torch.randint(VOCABULARY, (PROMPT + n,), generator=generator) for n in lengths]
    masks = [torch.arange(len(document)) >= PROMPT for document in documents]
    head = 0.02 * torch.randn(VOCABULARY, HIDDEN, generator=generator).to(torch.bfloat16)
    states = torch.randn(1, 8 * (PROMPT + size.tokens), HIDDEN, generator=generator).to(torch.bfloat16)
    columns = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    stated = torch.full(columns.shape, -12.0)
    versions, drafted = torch.ones(columns.shape, dtype=torch.int64), torch.full(columns.shape, int(Drafts.ON))
    for version in range(1 + _TURNS):  # the first one only counts tokens; this rank's turn comes once in the others
        clock.seconds *= version > 1
        session.weight_sync(WeightSync(version, None, head))
        session.rollout_end(RolloutStats(version, size.rows, sum(lengths), 1.0))
        harvest.open()
        with clock.running():
            tap.begin(version)
        for at in range(0, len(documents), 8):
            some = documents[at : at + 8], masks[at : at + 8]
            packed = states[:, : sum(map(len, some[0]))]
            with clock.running(), tap.capture(lambda some=some: some):  # type: ignore[misc]
                decoder.norm(packed)
        with clock.running():
            found = tap.of(documents, [PROMPT] * len(documents))
            batch = LogprobBatch(version, stated, stated, columns, version * versions, drafted, False)
            session.check_logprobs(replace(batch, states=found))
    assert found is not None and found.chosen
    clock.seconds /= _TURNS


def harvest(size: Size, clock: Clock) -> None:
    """Rank 0: choosing what is harvested of its rows; then a harvest of hidden states of 8B's width, taken into the buffer."""
    import torch

    from draft_training import Document, HiddenBuffer
    from spec_plugin.trainer.harvest_plan import HarvestPlan

    lengths, budget = lengths_of(size, size.rows), 16_384
    masks = [torch.arange(PROMPT + n) >= PROMPT for n in lengths]
    new = hasattr(HarvestPlan, "pieces")
    plan = HarvestPlan(budget, 1, 8192) if new else HarvestPlan(budget)
    if new:
        plan.open(budget, sum(map(len, masks)))
    taken = 0
    with clock.running():
        for at in range(0, len(masks), 8):
            some = masks[at : at + 8]
            if new:
                taken += sum(map(len, plan.pieces(some)))
            elif plan.left > 0:
                shared, cut = plan.shared_out(list(map(len, some)))
                taken += sum(min(len(some[i]), cut) for i, _ in shared)
    width = HIDDEN if size.tokens > 100 else 128
    documents = max(1, min(size.rows, taken // (max(1, sum(lengths) // len(lengths)))))
    n = max(8, taken // documents)
    states = torch.zeros(n, 3 * width, dtype=torch.bfloat16), torch.zeros(n, width, dtype=torch.bfloat16)
    buffer = HiddenBuffer(65_536, 1 << 30, 0)
    with clock.running():
        for _ in range(documents):
            document = Document(torch.zeros(n, dtype=torch.long), *states, torch.ones(n, dtype=torch.bool), 0)
            if new:
                buffer.add(document, owned=True)  # moved there once, and looked at on the card
            else:
                buffer.add(document)
        for _ in range(16):
            buffer.sample(8192, 0.25)
        buffer.newest(1024, 256) if new else buffer.newest(1024)


def suffix(size: Size, clock: Clock) -> None:
    """Each worker of an engine, method ``suffix``: what all other engines sampled, unpickled and taken into the trees."""
    import numpy as np

    from spec_plugin.api.rollouts import Rollout
    from spec_plugin.engine.vllm.suffix.trees import PromptTrees

    most = 4_194_304
    trees, rng = PromptTrees(24, K, most), np.random.default_rng(0)
    bounded = hasattr(trees, "_make_room")

    def ids(n: int) -> bytes:
        return rng.integers(0, VOCABULARY, n, dtype=np.int32).tobytes()

    count = (size.engines - 1) * size.requests
    lengths, chunk = lengths_of(size, max(1, count)), 64
    if bounded:  # no more travels than is kept
        kept = next((i for i in range(len(lengths)) if sum(lengths[: i + 1]) > most), len(lengths))
        lengths = lengths[: max(chunk, kept)]
        chunk = len(lengths)

    def some(i: int) -> None:
        part = lengths[i * chunk : (i + 1) * chunk]
        sent = pickle.dumps([Rollout(ids(PROMPT), ids(n)) for n in part])
        with clock.running():
            trees.remember(pickle.loads(sent))

    if count > 0:
        clock.each(math.ceil(len(lengths) / chunk), some)


PARTS = {
    part.__name__: part for part in (controller, merging, overlapping, spans, guard, evidence, harvest, front, suffix)
}
RANK_0 = ("controller", "merging", "overlapping", "spans", "guard", "evidence", "harvest")


# ------------------------------------------------------------------------------------------------ bytes


def moved(steps: int = 16) -> dict[str, dict[str, float]]:
    """GB between host and card in a step, counted from the sizes.

    Of a draft for Qwen3-8B, V=152k: the policy's copies in bfloat16, the optimizer's state in float32, a harvest of 16,384
    tokens, so many optimizer steps of 8192 tokens out of a buffer that holds two harvests.
    """
    matrix, state = VOCABULARY * HIDDEN * 2, 4 * 268_000_000
    token = 4 * HIDDEN * 2
    read, buffer = steps * 8192 * token, min(1 << 30, 2 * 16_384 * token)
    gb = 1e-9
    before = {
        "policy's copies, at the sync": 2 * matrix,
        "policy's copies, to the card and back, judge and slice": 4 * 2 * matrix,
        "optimizer's state, to the card and back, judge and slice": 4 * state,
        "harvest, to the host": 16_384 * token,
        "documents, to the card": read + 1024 * token,
    }
    after = {
        "policy's copies, at the sync": 2 * matrix,
        "policy's copies, to the card and back, judge and slice": matrix,  # the head, once; of the embedding rows alone
        "optimizer's state, to the card and back, judge and slice": 2 * state / 2,  # momenta rest in bfloat16
        "harvest, to the host": 16_384 * token,
        "documents, to the card": min(read, buffer) * 1.25,  # each once, with its rows of the embedding
    }
    return {name: {"before": before[name] * gb, "after": after[name] * gb} for name in before}


# ------------------------------------------------------------------------------------------------ running


def measured(part: str, size: Size, tree: Path, limit: float) -> tuple[float, bool]:
    """CPU seconds of a part with the code of a checkout, in a process of its own; and were some of them extrapolated."""
    folders = (tree, tree / "adapters", tree / "examples/minimal_adapter")
    own = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    asked = [sys.executable, __file__, "--worker", part, str(SIZES.index(size)), "--limit", str(limit)]
    done = subprocess.run(asked, env={**os.environ, **own}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{part} at {size.name} failed:\n{done.stderr[-2000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["seconds"], answer["extrapolated"]


def worker(part: str, size: int, limit: float) -> None:
    """Measure one part, and print what it took."""
    import torch

    torch.set_num_threads(1)
    clock = Clock(limit)
    PARTS[part](SIZES[size], clock)
    print(json.dumps({"seconds": clock.seconds, "extrapolated": clock.extrapolated}))


def exponent(small: float, large: float) -> float:
    """By which power of the tokens it grows from 4k to 16k."""
    return math.log(max(large, 1e-9) / max(small, 1e-9), 4)


def picture(rows: list[dict[str, Any]], file: Path) -> None:
    """CPU seconds by size, a panel for each part."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9), layout="constrained")
    panels = figure.subplots(3, 3)
    for panel, part in zip(panels.flat, PARTS, strict=True):
        for build, style in (("before", "o--"), ("after", "o-")):
            found = [row[build] for row in rows if row["part"] == part]
            if all(value is not None for value in found):
                panel.plot(range(len(found)), [max(v, 1e-5) for v in found], style, label=build)
        panel.set(yscale="log", title=part, ylabel="CPU seconds a step")
        panel.set_xticks(range(len(SIZES)), ["48x48", "16x1024\n1k", "4k", "16k"])
        panel.legend()
    figure.savefig(file, dpi=110)


def main() -> None:
    """Measure all parts at all sizes, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of an earlier build, measured side by side")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/bench")
    parser.add_argument("--only", action="append", choices=tuple(PARTS), help="this part alone; may be repeated")
    parser.add_argument("--limit", type=float, default=20.0, help="CPU seconds after which a part is extrapolated")
    parser.add_argument("--worker", nargs=2, metavar=("PART", "SIZE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker[0], int(options.worker[1]), options.limit)
        return
    sys.path.insert(0, str(ROOT))
    from examples.bench import common

    rows: list[dict[str, Any]] = []
    for part in options.only or PARTS:
        for size in SIZES:
            row: dict[str, Any] = {"part": part, "size": size.name, "before": None, "extrapolated": False}
            if options.before:
                row["before"], row["extrapolated"] = measured(part, size, options.before.resolve(), options.limit)
            row["after"], row["sampled"] = measured(part, size, ROOT, math.inf)
            rows.append(row)
            print(f"{part:11} {size.name:20} {row['before'] or math.nan:9.3f} {row['after']:9.3f} s", flush=True)
    columns = ["part", *(size.name for size in SIZES), "exponent 4k to 16k"]
    table = []
    for build in ("before", "after") if options.before else ("after",):
        for part in options.only or PARTS:
            mine = [row for row in rows if row["part"] == part]
            marks = ["~" if build == "before" and row["extrapolated"] else "" for row in mine]
            cells = [f"{mark}{row[build]:.3f}" for mark, row in zip(marks, mine, strict=True)]
            table.append([f"{part}, {build}", *cells, f"{exponent(mine[-2][build], mine[-1][build]):.2f}"])
        chosen = [part for part in RANK_0 if part in (options.only or PARTS)]
        sums = [sum(r[build] for r in rows if r["size"] == size.name and r["part"] in chosen) for size in SIZES]
        table.append([f"rank 0 in all, {build}", *(f"{s:.3f}" for s in sums), f"{exponent(sums[-2], sums[-1]):.2f}"])
    common.show("CPU seconds of a step", columns, table)
    bytes_moved = moved()
    sums = {build: sum(row[build] for row in bytes_moved.values()) for build in ("before", "after")}
    shown = [[what, f"{row['before']:.2f}", f"{row['after']:.2f}"] for what, row in bytes_moved.items()]
    common.show(
        "GB between host and card in a step (counted)",
        ["what", "before", "after"],
        [*shown, ["all", f"{sums['before']:.2f}", f"{sums['after']:.2f}"]],
    )
    options.out.mkdir(parents=True, exist_ok=True)
    settings = {"ranks": RANKS, "vocabulary": VOCABULARY, "hidden": HIDDEN, "k": K, "limit": options.limit}
    common.write_results("scale", settings, [*rows, {"moved": bytes_moved}], common.environment("cpu"), options.out)
    if not options.only:
        picture(rows, options.out / "scale.png")


if __name__ == "__main__":
    main()
