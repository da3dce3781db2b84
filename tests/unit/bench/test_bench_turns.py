"""Runs in turns: never two at once, what a run was stopped for is taken off, and a killed one goes on where it saved."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from spec_plugin_conformance.launch import Launch, Steps, stop

from examples.bench.long_run import equivalence, without_ours
from examples.bench.turns import Contestant, Step, TurnsError, in_turns

#: a "trainer" of two processes: the child computes, the parent logs; a step takes 0.4 s
TRAINER = """
import json, multiprocessing, sys, time
from pathlib import Path

def work(first, last, queue, beats):
    for step in range(first, last + 1):
        began = time.monotonic()
        for _ in range(40):
            time.sleep(0.01)
            with open(beats, "a") as file:
                file.write(f"{time.monotonic()}\\n")
        queue.put((step, time.monotonic() - began))

if __name__ == "__main__":
    folder, last, fails_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    saved = folder / "saved"
    first = int(saved.read_text()) + 1 if saved.exists() else 1
    queue = multiprocessing.Queue()
    child = multiprocessing.Process(target=work, args=(first, last, queue, folder / "beats"))
    child.start()
    for _ in range(first, last + 1):
        step, seconds = queue.get()
        if step == fails_at:
            child.kill()
            sys.exit(3)
        with open(folder / "steps", "a") as file:
            file.write(json.dumps([step, {"step_s": seconds}]) + "\\n")
        if step == 3:
            saved.write_text(str(step))
    child.join()
"""


def run(folder: Path, name: str, steps: int = 6, fails_at: int = -1) -> Contestant:
    out = folder / name
    out.mkdir()
    script = folder / "trainer.py"
    script.write_text(TRAINER)
    launch = Launch(
        (sys.executable, str(script), str(out), str(steps), str(fails_at)), dict(os.environ), out, steps, name
    )
    return Contestant(name, launch, Steps(out / "steps", lambda line: tuple(json.loads(line))))


def beats(folder: Path) -> list[float]:
    return [float(line) for line in (folder / "beats").read_text().splitlines()]


@pytest.fixture(autouse=True)
def _shared_tmp(monkeypatch):
    monkeypatch.setattr("examples.bench.turns._own_tmp", lambda private: [])


def test_two_runs_make_their_steps_in_turn_and_are_not_charged_for_waiting(tmp_path):
    runs = [run(tmp_path, name) for name in ("one", "other")]
    assert list(in_turns(runs, 6, tmp_path, said=lambda line: None)) == [1, 2, 3, 4, 5, 6]
    for each in runs:
        assert [step.number for step in each.steps] == [1, 2, 3, 4, 5, 6]
        # who ends a round begins the next one, and is hardly stopped
        assert sum(step.stopped_s > 0.3 for step in each.steps[1:]) >= 2
        assert math.isnan(each.steps[0].took_s), "of a start-up"
        for step in each.steps[1:]:
            assert 0.3 < step.part("step_s") <= step.metrics["step_s"], (
                "what it was stopped for is taken off, and no more"
            )
            assert step.took_s > 0.3
        assert each.memory_gb > 0.005
    marks = sorted([(t, 0) for t in beats(tmp_path / "one")] + [(t, 1) for t in beats(tmp_path / "other")])
    changes = sum(a[1] != b[1] for a, b in pairwise(marks))
    assert changes <= 3 * 6, "side by side they would change at each of 240 beats"


def test_a_turn_may_be_several_steps_of_which_the_first_was_woken(tmp_path):
    runs = [run(tmp_path, name, steps=8) for name in ("one", "other")]
    assert list(in_turns(runs, 8, tmp_path, kill_at=6, said=lambda line: None, each=3)) == [1, 4, 6, 7, 8]
    long_stops = [[step.number for step in each.steps if step.stopped_s > 0.3] for each in runs]
    assert long_stops == [[2, 5, 8], [2, 7]], "who ends a round begins the next one"


def test_a_killed_run_goes_on_from_what_it_saved(tmp_path):
    runs = [run(tmp_path, name) for name in ("plain", "flag")]
    runs[1].again = runs[1].launch
    said: list[str] = []
    assert list(in_turns(runs, 6, tmp_path, kill_at=5, said=said.append))[-1] == 6
    assert [step.number for step in runs[1].steps] == [1, 2, 3, 4, 5, 6]
    assert [math.isnan(step.took_s) for step in runs[1].steps] == [True, False, False, True, False, False]
    assert len(beats(tmp_path / "flag")) > len(beats(tmp_path / "plain")) + 40, "steps 4 and 5 were made twice"
    assert "flag: killed behind step 5, goes on from its last checkpoint" in said


def test_a_run_that_ends_early_is_said_with_its_log_and_the_other_one_ends_too(tmp_path):
    runs = [run(tmp_path, "one"), run(tmp_path, "other", fails_at=3)]
    with pytest.raises(TurnsError, match="other ended with exit status 3 behind step 2"):
        list(in_turns(runs, 6, tmp_path, said=lambda line: None))
    assert all(each._process is not None and each._process.poll() is not None for each in runs)


@pytest.mark.parametrize(
    ("logged", "took", "stopped", "part"), [(3.0, 8.0, 9.0, 3.0), (12.0, 8.0, 9.0, 3.0), (3.0, 8.0, 0.1, 3.0)]
)
def test_a_stop_may_lie_in_a_part_of_the_step_or_before_it(logged, took, stopped, part):
    assert Step(2, {"gen": logged}, took, stopped).part("gen") == pytest.approx(part)


@pytest.mark.parametrize(
    ("a", "b", "holds"),
    [
        ([0.5, 0.6, 0.7, 0.8], [0.51, 0.6, 0.69, 0.8], True),
        ([0.5, 0.6, 0.7, 0.8], [0.6, 0.7, 0.8, 0.9], False),
        ([0.5, 0.9, 0.4, 0.8], [0.8, 0.6, 0.7, 0.5], False),
    ],
)
def test_rewards_are_equivalent_if_a_difference_that_matters_is_ruled_out(a, b, holds):
    found = equivalence(a, b, 0.05)
    assert found is not None and found.holds is holds
    assert equivalence(a[:1], b[:1], 0.05) is None


def test_the_plain_run_gets_the_overrides_that_are_not_ours():
    verl = ("actor_rollout_ref.rollout.n=4", "+actor_rollout_ref.rollout.custom.spec.k=5", "data.seed=1")
    assert without_ours(verl) == ("actor_rollout_ref.rollout.n=4", "data.seed=1")
    openrlhf = ("--spec.k", "3", "--rollout.n_samples_per_prompt", "4", "--spec.serve=always", "--ds.packing_samples")
    assert without_ours(openrlhf) == ("--rollout.n_samples_per_prompt", "4", "--ds.packing_samples")


def test_stopping_a_launcher_that_is_dead_ends_what_it_has_left(tmp_path: Path) -> None:
    word = tmp_path / "pid"
    launcher = subprocess.Popen(
        ["sh", "-c", f"sleep 600 & echo $! > {word}"], start_new_session=True, stdout=subprocess.DEVNULL
    )
    launcher.wait()
    left = psutil.Process(int(word.read_text()))
    stop(launcher)
    left.wait(10)
    stop(launcher)  # nothing is left: no error
