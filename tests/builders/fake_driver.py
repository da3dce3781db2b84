"""A driver without a trainer: it writes the trace that a right adapter would leave, to test the kit's own machinery."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import ClassVar

import torch
from spec_plugin_conformance.driver import ConformanceDriver, RunFailed
from spec_plugin_conformance.engines import WRONG_OPTION, WRONG_VALUE
from spec_plugin_conformance.plain import FOLDER

from builders.traces import Trace, metrics

SEEN_WITHOUT_THE_FLAG = {"engine_configured", "engine_request"}
NEEDS_A_TRAINER = (
    "hidden_states_equal_a_plain_forward",
    "failed_self_test_stops_the_run",
    "speculation_is_told_as_it_was",
    "planted_errors_reach_the_guard",
    "violations_stop_the_run",
    "faults_leave_the_run_alive",
)


class Driver(ConformanceDriver):
    metric_prefix = "actor/"
    adapter_modules = ("no_such_adapter",)
    trainer_modules = ("json",)
    requests: ClassVar = {"max_tokens": 8}
    refused = dict.fromkeys(NEEDS_A_TRAINER, "there is no trainer | here")

    @property
    def target(self) -> Path:
        return self.root

    def launch(self, run):
        with (self.root / "launched").open("a") as file:
            file.write(f"{run.out.name}\n")
        if run.options.get(WRONG_OPTION) == WRONG_VALUE:
            raise RunFailed(f"SpecConfigError: {WRONG_OPTION}={WRONG_VALUE}")
        if run.enabled:
            folder = Path(run.options["plugins"][0].partition("=")[2])
            folder.mkdir(parents=True, exist_ok=True)
            trace = Trace(first_version=2, steps=2, draft=2) if run.resume_from else Trace()
            (folder / "1.jsonl").write_text("".join(json.dumps(e) + "\n" for e in trace.events))
        elif FOLDER in os.environ:
            events = [e | {"pid": 2} for e in Trace(steps=1).events if e["hook"] in SEEN_WITHOUT_THE_FLAG]
            (Path(os.environ[FOLDER]) / "2.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
        for step, values in metrics(self.metric_prefix).items():
            yield step, values if run.enabled else {"loss": 1.0}

    def policy(self, run, step):
        return {"weight": torch.ones(3)}

    def random_state(self, run, step):
        return {"torch": "state"}


class Impure(Driver):
    """Its flag changes the policy."""

    def policy(self, run, step):
        return {"weight": torch.ones(3) + run.enabled}


class Excused(Impure):
    """It is not its own fault."""

    shapes: ClassVar = {"elsewhere": "another machine"}
    known_in: ClassVar = {
        None: {"policy_is_bitwise_equal": "the trainer forgets its seed", "off_is_off": "mended long ago"},
        "elsewhere": {"policy_is_bitwise_equal": "its clock is wrong"},
    }

    def __init__(self, root, shape=None):
        super().__init__(root)


class Reordering(Driver):
    """It trains on fresh rollouts in another order than on recorded ones."""

    def policy(self, run, step):
        return {"weight": torch.ones(3) + (run.out.name == "main")}


class Broken(Driver):
    """Its trainer does not start."""

    def launch(self, run):
        raise RunFailed("no GPU here")
        yield
