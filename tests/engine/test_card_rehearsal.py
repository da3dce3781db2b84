"""The parts of the GPU hour at a tiny shape, on one engine for all: when a card is at hand, its minutes are no time to debug."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from draft_training.eagle3 import save_draft
from examples.bench import card, engines
from examples.bench.card_parts import (
    fp8,
    head,
    memory,
    record,
    report,
    rollouts,
    sleep,
    smoke,
    start,
    tolerances,
    trainer,
)
from examples.bench.card_parts.probe import FLAG_PROBE
from examples.bench.card_parts.setup import SIZES, Models
from spec_plugin.engine.vllm.extension import SpecWorkerExtension

pytestmark = pytest.mark.engine
WHERE = {"card": None, "card_memory": None, "cpu": "some", "versions": {}, "date": "today", "commit": "c"}
REQUESTS = 64  # the most that a part asks for
#: kinds of rows that each part must have; ``memory`` is first: a refresh has a higher version than those before it in its engine
ROWS = {
    memory: {"refresh", "peak"},
    start: {"engine", "step"},
    rollouts: {"calibration", "rollouts"},
    head: {"head"},
    trainer: {"smoke", "training"},
    sleep: {"before", "cycle"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    folder = tmp_path_factory.mktemp("card")
    target = small.make_target(folder / "target")
    config = small.draft_config(target)
    save_draft(folder / "draft", config, small.good_tensors(config))
    return Models(target, target, folder / "draft", folder / "draft", promised=3.0)


@pytest.fixture(scope="module")
def shared(models) -> Iterator[engines.Engine]:
    """One engine with the flag in the place of all that a part would start: it cannot tell what they are, but that they run.

    vLLM makes the extension a base of its worker class for the whole process, and refuses another one that shares a
    name with it: what the other tests' engines have stands aside until the end.
    """
    bases = CPUWorker.__bases__
    CPUWorker.__bases__ = tuple(base for base in bases if not issubclass(base, SpecWorkerExtension))
    asked = engines.EngineSettings(max_num_seqs=REQUESTS, more={"worker_extension_cls": FLAG_PROBE})
    try:
        yield engines.build("flag", models.target, asked, models.draft, max(SIZES["tiny"].step_widths))
    finally:
        CPUWorker.__bases__ = bases


class Shared:
    """Like ``engines.Remote``, in this process, and the same engine each time."""

    engine: engines.Engine

    def __init__(self, *_: Any, **__: Any) -> None:
        self.start_seconds = 0.0

    def wait(self) -> Shared:
        return self

    def close(self) -> None:
        """It is everybody's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def begun(folder: Path, part: Any) -> record.Record:
    options = {"minutes": 5.0, "shape": None, "dtype": None, "eager": False, "threads": 1, "k": 3, "nats": (1.0,)}
    settings = card.settings_of({**options, "small": folder, "work": folder / "work"}, WHERE)
    name = part.__name__.rsplit(".", 1)[1]
    found = record.begin(folder / f"{name}.json", name, {**settings, **card.limits(300.0)}, WHERE)
    found.limit(270.0)
    return found


@pytest.mark.parametrize("part", [*ROWS, fp8], ids=lambda part: part.__name__.rsplit(".", 1)[1])
def test_a_part_of_the_gpu_hour_runs_and_has_its_tables(part, shared, models, tmp_path, monkeypatch) -> None:
    Shared.engine = shared
    monkeypatch.setattr(part, "Remote", Shared, raising=False)
    found = begun(tmp_path, part)
    part.measure(found, models)
    rows = found.content["rows"]
    assert {row["kind"] for row in rows} >= ROWS.get(part, set()), found.content["notes"]
    assert not [row for row in rows if row["kind"] in ("engine lost", "refresh refused")]
    assert all(row["result"] == "ran" for row in rows if row["kind"] == "smoke"), rows
    found.finish("done")
    assert "done after" in report.write(tmp_path, card.PARTS).read_text()


def test_the_smoke_and_the_tolerances_run_on_an_engine_as_a_trainer_has_it(models, tmp_path, monkeypatch) -> None:
    mine, theirs = multiprocessing.Pipe(duplex=False)
    smoked, compared = begun(tmp_path, smoke), begun(tmp_path, tolerances)

    async def both() -> Any:
        task = smoke.Task(models, smoked.settings, {}, {})
        front, engine = await smoke._start(task, FLAG_PROBE)
        end = engine.shutdown
        try:
            monkeypatch.setattr(engine, "shutdown", lambda: None)
            monkeypatch.setattr(smoke, "_start", lambda *_: _done((front, engine)))
            monkeypatch.setattr(tolerances, "_start", lambda *_: (front, engine))
            await smoke._engine(smoke.Items(theirs), task)
            return await tolerances._in_engine(compared, models)
        finally:
            end()

    sampled = asyncio.run(both())
    theirs.close()
    for row in _received(mine):
        smoke._put(smoked, {"kind": "smoke", "group": "engine", **row})
    items = {row["item"]: row["result"] for row in smoked.content["rows"]}
    assert len(items) == 7 and set(items.values()) == {"ran"}, smoked.content["rows"]
    monkeypatch.setattr(tolerances, "_in_engine", lambda *_: _done(sampled))
    tolerances.measure(compared, models)
    rows = compared.content["rows"]
    assert {row["kind"] for row in rows} == {"greedy", "self-test", "sampled", "log-probs", "guard"}
    assert all(row["mean"] < 1e-3 for row in rows if row["kind"] == "log-probs")
    assert "identical" in report.write(tmp_path, card.PARTS).read_text()


async def _done(value: Any) -> Any:
    return value


def _received(pipe: Any) -> Iterator[dict[str, Any]]:
    try:
        while True:
            yield pipe.recv()
    except EOFError:
        return


def test_the_policy_of_the_trainers_part_has_the_entropy_that_was_asked_for(tmp_path) -> None:
    from spec_plugin_conformance import tiny

    from examples.bench.card_parts import trl

    target = tiny.make_target(tmp_path / "target", num_key_value_heads=2)
    for nats in (0.5, 1.0):
        trl.heat(target, nats)
        assert abs(trl.entropy(trl._logits(target)) - nats) < 0.02
    with pytest.raises(ValueError, match="9 nats a token are out of reach"):
        trl.heat(target, 9.0)
    assert torch.isfinite(trl._logits(target)).all()
