"""An engine that drafts with one of the plugin's methods, and what it counts of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import small

from spec_plugin import SpecConfig
from spec_plugin.api.events import StepTiming, TargetInfo
from spec_plugin.api.method import Method
from spec_plugin.engine.vllm.additional import with_own_settings
from spec_plugin.engine.vllm.schedule.counters import read_spec_counters
from spec_plugin.engine.vllm.schedule.scheduler import SCHEDULER
from spec_plugin.lifecycle.manager import built_in_method

K, SEQS = 3, 16


def method_of(target: Path, **options: Any) -> Method:
    hf = json.loads((target / "config.json").read_text())
    info = TargetInfo(path=str(target), hf_config=hf, dtype="float32", max_num_seqs=SEQS)
    found = built_in_method(SpecConfig.parse({"k": K, **options}), info)
    assert found is not None
    return found


def engine_with(target: Path, method: Method) -> Any:
    return small.start_engine(
        target,
        target,
        speculative_config=method.speculative_config(),
        scheduler_cls=SCHEDULER,
        **with_own_settings({}, **method.worker_settings()),
    )


def set_k(llm: Any, k: int) -> None:
    core = llm.llm_engine.engine_core.engine_core
    core.spec_set_schedule([k] * (SEQS + 1))
    core.spec_pause(k == 0)


def steps(llm: Any) -> list[StepTiming]:
    """Those that were alike."""
    taken = [StepTiming(*row) for row in llm.llm_engine.engine_core.engine_core.spec_take_steps()]
    return [s for s in taken if s.alike]


def counted(llm: Any) -> tuple[list[list[int]], int, int]:
    """What it says greedily; drafts and accepted tokens."""
    before = read_spec_counters()
    said = small.greedy(llm)
    after = read_spec_counters()
    return said, after["drafts"] - before["drafts"], after["accepted_tokens"] - before["accepted_tokens"]
