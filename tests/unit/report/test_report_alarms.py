"""How often the report warns of a run in which nothing is wrong, and whether it sees what is: on simulated noise."""

from __future__ import annotations

import math
import random

import pytest

from spec_plugin.api.speculation import Reason, as_metrics
from spec_plugin.commands.report.findings import RunFinding, findings_of
from spec_plugin.commands.report.run import LoggedRun

RUNS = 200


class Healthy:
    """Numbers of a run that goes well: acceptance rises and wanders, the learning rate warms up, responses grow."""

    def __init__(self, seed: int) -> None:
        self._rng = rng = random.Random(seed)
        self.steps = rng.choice((30, 60, 120, 300))
        self._noise, self._memory = rng.uniform(0.02, 0.08), rng.uniform(0.0, 0.9)
        self._top, self._cost = rng.uniform(2.2, 4.5), rng.uniform(0.45, 0.6)
        self._warmup, self._first = rng.choice((1, 5, 20)), rng.randint(2, 8)
        self._wanders = {"acceptance": 0.0, "loss": 0.0}

    def run(self) -> LoggedRun:
        """As the report reads it."""
        return LoggedRun("healthy", "verl", {step: self._step(step) for step in range(1, self.steps + 1)})

    def _near(self, value: float, noise: float = 0.05) -> float:
        return value * math.exp(self._rng.gauss(0, noise))

    def _wandering(self, name: str) -> float:
        """A factor about 1 that remembers: what differs from step to step, and what drifts."""
        fresh = math.sqrt(1 - self._memory**2) * self._rng.gauss(0, self._noise)
        self._wanders[name] = self._memory * self._wanders[name] + fresh
        return math.exp(self._wanders[name])

    def _step(self, step: int) -> dict[str, float]:
        length = 1 + (self._top - 1) * (1 - math.exp(-step / 15)) * self._wandering("acceptance")
        drafts = step >= self._first
        speed = max(1.0, length * self._cost)
        found = {
            "spec/on": float(drafts),
            **as_metrics(Reason.PREDICTED_TO_PAY if drafts else Reason.NO_DRAFT_YET),
            "spec/acceptance_length": length if drafts else 1.0,
            "spec/expected_acceptance": self._near(length, 0.03),
            "spec/draft_loss": (2 + 4 * math.exp(-step / 20)) * self._wandering("loss"),
            "spec/draft_version": float(step),
            "spec/train_ms": self._near(8000, 0.1),
            "spec/refresh_ms": self._near(300, 0.2),
            "spec/harvest_ms": self._near(20, 0.2),
            "spec/k_b8": float(self._rng.choice((3, 4))),
            "spec/break_even_b8": 1.8,
            "spec/logprob_diff_mean": self._near(1e-3, 0.2),
            "spec/logprob_tolerance": 1e-2,
            "step_s": self._near(100),
            "generation_s": self._near(60),
            "lr": 1e-6 * min(1.0, step / self._warmup),
            "entropy": self._near(0.5 * math.exp(-step / 300)),
            "response_tokens": self._near(1000 * (1 + step / 400)),
            "grad_norm": self._near(0.3, 0.3),
            "reward": 0.7 - 0.4 * math.exp(-step / 80) + self._rng.gauss(0, 0.03),
        }
        found |= {
            f"spec/{name}": 0.0 for name in ("failed", "dropped", "refresh_refused", "logprob_alarms", "policy_lag")
        }
        found |= {"spec/provenance": 1.0, "spec/versions_known": 1.0}
        return found | (
            {"spec/speedup_realised": self._near(speed, 0.03), "spec/speedup_predicted": speed} if drafts else {}
        )


@pytest.fixture(scope="module")
def healthy() -> list[LoggedRun]:
    return [Healthy(seed).run() for seed in range(RUNS)]


def warnings(run: LoggedRun) -> list[RunFinding]:
    return [finding for finding in findings_of(run) if finding.level != "fine"]


def test_at_most_one_healthy_run_in_ten_is_warned_of(healthy):
    alarmed = [found for run in healthy if (found := warnings(run))]
    assert len(alarmed) <= RUNS // 10, [f.text for found in alarmed for f in found]
    fell = [f for found in alarmed for f in found if "acceptance fell" in f.text]
    assert len(fell) <= RUNS // 20
    assert not [f for found in alarmed for f in found if f.level == "bad"]


def test_nineteen_of_twenty_falls_by_half_are_seen(healthy):
    long = [run for run in healthy if len(run.numbers) >= 120]
    seen = 0
    for run in long:
        half = run.numbers[len(run.numbers) // 2]
        fallen = {s: dict(values) for s, values in run.steps.items()}
        for step in range(half, len(run.numbers) + 1):
            fallen[step]["spec/acceptance_length"] = 1 + 0.5 * (fallen[step]["spec/acceptance_length"] - 1)
        seen += any("acceptance fell" in f.text for f in warnings(LoggedRun("fallen", "verl", fallen)))
    assert seen >= 0.95 * len(long)
