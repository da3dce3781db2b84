"""Part 3: rollouts without drafts, with each fixed k and under the controller, round by round in turn."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from examples.bench import control
from examples.bench.card_parts.record import Record
from examples.bench.card_parts.setup import Models, sizes_of
from examples.bench.control import Bench, Regime
from examples.bench.engines import EngineSettings, Kind, Remote
from examples.bench.steering import calibrate
from examples.bench.workload import addition_prompts


def measure(record: Record, models: Models) -> None:
    """Two engines; a row for each regime as soon as it is measured."""
    sizes, settings = sizes_of(record), record.settings
    options: dict[str, Any] = {
        "batches": sizes.rollout_batches,
        "tokens": sizes.tokens,
        "rounds": sizes.rounds,
        "temperature": 1.0,
        "k": settings["k"],
        "file": None,
        "only": "",
    }
    asked = EngineSettings(
        dtype=settings["dtype"],
        max_num_seqs=max(64, *sizes.rollout_batches),
        eager=settings["eager"],
        kv_gib=6.0 if settings["cuda"] else None,
    )
    kinds: tuple[Kind, Kind] = ("plain" if settings["cuda"] else "live", "flag")
    begun = [Remote(settings["threads"], kind, models.target, asked, models.draft, settings["k"]) for kind in kinds]
    live, flag = (engine.wait() for engine in begun)
    most = asked.max_num_seqs
    calibration = calibrate(
        flag, addition_prompts(models.small, most, seed=5), sorted({1, 8, 32, most}), settings["k"], repeats=2
    )
    for step in calibration.steps:
        record.row(kind="calibration", **asdict(step))
    for name, regime in _regimes(options, models.promised):
        if not record.enough_for(20.0, regime.name):
            continue
        drafts = {"good": getattr(models, name)}
        bench = Bench(regime, settings["dtype"], live, flag, models.target, drafts, calibration, options)
        record.row(kind="rollouts", draft=name, k=settings["k"], **asdict(bench.measure()))
    live.close()
    flag.close()


def _regimes(options: dict[str, Any], promised: float) -> list[tuple[str, Regime]]:
    """Those of ``control`` whose draft stays what it is; each with the mediocre draft and with the good one."""
    found = []
    for regime in (regime for regime in control.regimes(options) if regime.draft == "good"):
        found.append(("mediocre", replace(regime, name=f"{regime.name}, mediocre draft", promised=promised)))
        found.append(("draft", regime))
    return found
