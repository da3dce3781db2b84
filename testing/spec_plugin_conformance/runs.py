"""Runs the trainer when a check first asks for it, and shares each run among all checks."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Container, Generator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.events import TargetInfo
from spec_plugin.api.method import Method
from spec_plugin.lifecycle.manager import built_in_method
from spec_plugin_conformance import plain
from spec_plugin_conformance.driver import ConformanceDriver, RunFailed, RunSettings
from spec_plugin_conformance.engines import WRONG_OPTION, WRONG_VALUE
from spec_plugin_conformance.faults import SHORT, STEPS, FaultTour, ShortTour, read_tour
from spec_plugin_conformance.forward import Pack, read_pack
from spec_plugin_conformance.journal import read_trace
from spec_plugin_conformance.plants import SELF_TEST, PlantedErrors
from spec_plugin_conformance.targets import tiny_targets

#: of every run with the flag: draft from the first step, hash what the engine holds, and train the draft in slices that
#: a number of steps ends, not the clock of a machine that may be busy
_OPTIONS = {"serve": "always", "audit": True, "train_share": 0.5, "train_max_steps": 2}
#: of the run whose draft must be seen to learn
_TRAIN_STEPS = 12
#: name of the check that an adapter without checkpoints refuses
RESUME = "save_kill_resume"
#: before the reason of a check that is not for this adapter, or not for this method
REFUSED = "refused: "
#: names of the checks that look at the main run's self-test
ABOUT_SELF_TEST = frozenset({"samples_are_the_targets", "activated_by_the_documented_flag", "hooks_fire_in_order"})
#: and of those that look at the whole tour of faults, or at the checkpoint that it goes on from
ABOUT_TOUR = frozenset({RESUME, "faults_leave_the_run_alive"})
#: step of the last checkpoint before the kill
SAVED = 2
_KILLED_AFTER = 3


@dataclass
class KitRun:
    """One run of the trainer that has ended: what it recorded and logged, and why it failed."""

    name: str
    settings: RunSettings
    records: Path  # folder of recorder and tour
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)  # by step
    failure: str | None = None  # why it stopped early; None also for a run that we killed
    seconds: float = 0.0
    validation: Mapping[str, Any] = field(default_factory=dict)  # ``ConformanceDriver.validation``

    @property
    def trace(self) -> list[dict[str, Any]]:
        """Every event that any process recorded, in order of time; a validation request counts as a test."""
        events = read_trace(self.records)
        for e in events if self.validation else ():
            if e["hook"] == "engine_request" and e["asked"].items() >= self.validation.items():
                e["test"] = True
        return events

    @property
    def tour(self) -> list[dict[str, Any]]:
        """The events of ``faults.FaultTour``, in order; empty in a run without it."""
        return read_tour(self.records)

    @property
    def packs(self) -> list[Pack]:
        """Hidden states of the first harvests, ``recorder.PACKS`` of each process."""
        return [read_pack(file) for file in sorted(self.records.glob("*.safetensors"))]


class Progress:
    """Called for each run and step; does nothing, subclasses show it."""

    def begin(self, name: str, steps: int) -> None:
        """A run starts, of so many steps unless it is killed before."""

    def step(self, name: str, step: int) -> None:
        """The run has completed this step."""

    def end(self, run: KitRun) -> None:
        """The run has ended, failed or been killed."""


class KitRuns:
    """The checks' runs, by name: main, off, plain, faults, refused, misconfigured; on if main and off end with other bits."""

    def __init__(
        self,
        driver: Callable[[Path], ConformanceDriver],
        root: Path,
        progress: Progress | None = None,
        asked: Container[str] = ABOUT_SELF_TEST | ABOUT_TOUR,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Start no run yet.

        Args:
            driver: the adapter's driver class.
            root: folder for everything.
            progress: hears of runs and steps.
            asked: names of the chosen checks, so that nothing is run for others.
            options: of the plugin, in all runs with the flag.
        """
        self._asked = dict(options or {})
        self._self_test, self._whole_tour = (any(n in asked for n in names) for names in (ABOUT_SELF_TEST, ABOUT_TOUR))
        self._driver_class, self.root, self._progress = driver, root, progress or Progress()
        self._driver: ConformanceDriver | None = None
        self.by_name: dict[str, KitRun] = {}

    @property
    def driver(self) -> ConformanceDriver:
        """The adapter's driver; it makes policy and data when first used."""
        if self._driver is None:
            folder = self.root / "driver"
            folder.mkdir(parents=True, exist_ok=True)
            self._driver = self._driver_class(folder)
        return self._driver

    @cached_property
    def method(self) -> Method | None:
        """How the runs draft; None if unknown here: a method that is not built in, or a target without config.json."""
        target = self.driver.target
        if not (target / "config.json").exists():
            return None
        hf = json.loads((target / "config.json").read_text())
        # as the trainers here do it: the policy is sent before it is used
        info = TargetInfo(str(target), hf, "float32", load_format="dummy")
        return built_in_method(SpecConfig.parse(self._asked), info)

    def needs_draft(self) -> None:
        """Skip a check that judges the draft's tensors, if the method has none."""
        if self.method is not None and not self.has_draft:
            pytest.skip(f"{REFUSED}the method {self.method.name} has no draft to train or refresh")

    @property
    def has_draft(self) -> bool:
        """True if the method has a draft of tensors, or is unknown."""
        return self.method is None or self.method.draft is not None

    @property
    def harvests(self) -> bool:
        """True if the method reads hidden states, or is unknown."""
        return self.method is None or self.method.harvest is not None

    @property
    def remembers(self) -> bool:
        """True if the method drafts from earlier rollouts."""
        return self.method is not None and self.method.memory is not None

    @property
    def prefix(self) -> str:
        """What the trainer's log puts before ``spec/…``."""
        return self.driver.metric_prefix

    def run(self, name: str) -> KitRun:
        """The run of this name, which is started by the first call; it may have failed (``KitRun.failure``)."""
        if name not in self.by_name:
            getattr(self, f"_run_{name}")()
        return self.by_name[name]

    def finished(self, name: str) -> KitRun:
        """A run that must have reached its end; the check fails if it did not."""
        run = self.run(name)
        if run.failure is not None:
            pytest.fail(
                f"the run {name!r} stopped early; --keep keeps {run.settings.out}:\n{run.failure}",
                pytrace=False,
            )
        return run

    def _run_main(self) -> None:
        options = self._options("main") | {
            "self_test": self._self_test,
            "train_max_steps": _TRAIN_STEPS,
        }
        self._launch_and_kill("main", True, options, self.root / "rollouts")

    def _run_on(self) -> None:
        recorded = self.finished("main").settings.replay
        self._launch_and_kill(
            "on", True, self._options("on") | {"self_test": False, "unsampled_rows": "allow"}, recorded
        )

    def _run_off(self) -> None:
        self._launch_and_kill("off", False, {}, self.finished("main").settings.replay)

    def _launch_and_kill(self, name: str, enabled: bool, options: Mapping[str, Any], replay: Path | None) -> None:
        # six steps, so that the kill after the third hits a run in the middle of its work
        settings = RunSettings(self._out(name), 6, enabled, options, replay=replay, save_every=SAVED)
        self._launch(name, settings, _KILLED_AFTER)

    def _run_faults(self) -> None:
        """It goes on from the main run's checkpoint, so that one start-up shows both."""
        tour = FaultTour if self._whole_tour else ShortTour
        plugin = f"{tour.__module__}:{tour.__name__}={self._records('faults')}"
        # the self-test must report; what it finds, main has shown
        family = tiny_targets().get(self.driver.family or "")
        seconds = 15 if family is None else family.self_test_seconds
        options = self._options("faults") | {"self_test": self._whole_tour, "self_test_seconds": seconds}
        options["plugins"] = [*options["plugins"], plugin]
        killed, steps = None, STEPS if self._whole_tour else SHORT
        steps *= 1 + self.driver.asynchronous  # half of whose phases may sample nothing
        if self._whole_tour and RESUME not in self.driver.refused:
            main = self.finished("main")
            saved = sum(e["hook"] == "spec_save" for e in main.trace)  # the trainer may have come further than we saw
            killed, steps = main.settings, steps + SAVED * max(1, saved)
        settings = RunSettings(self._out("faults"), steps, options=options, save_every=SAVED, resume_from=killed)
        self._launch("faults", settings)

    def _run_plain(self) -> None:
        """One step without the flag and without recorded rollouts: what engine and requests are to be like."""
        records = self._records("plain")
        records.mkdir(parents=True, exist_ok=True)
        os.environ[plain.FOLDER] = str(records)
        try:
            self._launch("plain", RunSettings(self._out("plain"), 1, enabled=False))
        finally:
            del os.environ[plain.FOLDER]

    def _run_refused(self) -> None:
        """A run whose engine reports a failed self-test."""
        PlantedErrors(self._records("refused")).plant(SELF_TEST)
        self._launch("refused", RunSettings(self._out("refused"), 1, options=self._options("refused")))

    def _run_misconfigured(self) -> None:
        """A run with an option that the plugin refuses."""
        options = self._options("misconfigured") | {WRONG_OPTION: WRONG_VALUE}
        self._launch("misconfigured", RunSettings(self._out("misconfigured"), 1, options=options))

    def _options(self, name: str) -> dict[str, Any]:
        return {
            **_OPTIONS,
            **self._asked,
            "plugins": [
                f"spec_plugin_conformance.recorder:Recorder={self._records(name)}",
                *SpecConfig.parse(self._asked).plugins,
            ],
        }

    def _out(self, name: str) -> Path:
        return self.root / "runs" / name

    def _records(self, name: str) -> Path:
        return self.root / "records" / name

    def _launch(self, name: str, settings: RunSettings, kill_after: int | None = None) -> None:
        driver = self.driver
        run = KitRun(name, settings, self._records(name), validation=driver.validation)
        PlantedErrors(run.records).place_of_version = driver.engine_version
        began = time.monotonic()
        self._progress.begin(name, kill_after or settings.steps)
        try:
            with contextlib.closing(driver.launch(settings)) as steps:
                self._follow(run, steps, kill_after)
        except RunFailed as error:
            run.failure = str(error) or "the driver raised RunFailed without a reason"
        finally:
            run.seconds = time.monotonic() - began
            self.by_name[name] = run
            self._progress.end(run)

    def _follow(
        self, run: KitRun, steps: Generator[tuple[int, dict[str, float]], None, None], kill_after: int | None
    ) -> None:
        for step, metrics in steps:
            run.metrics[step] = metrics
            self._progress.step(run.name, step)
            if step == kill_after:
                return
