"""check and doctor say which CUDA graphs a run gets and what of it nobody has run on a GPU, by one table."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from spec_plugin.commands import doctor, untried
from spec_plugin.commands.untried import NOTHING, UNTRIED, graphs_of, untried_anywhere, untried_in
from spec_plugin.config import SpecConfig
from spec_plugin.events import TargetInfo
from spec_plugin.model_runner import Runner
from spec_plugin.run_plan import Model, RunFacts

V1, V2 = Runner(False, "a test"), Runner(True, "a test")
TRAINS: Any = SimpleNamespace(draft=object(), harvest=(1, 2), settings={"method": "eagle3"})
RUN = RunFacts(
    SpecConfig.parse(None),
    TargetInfo("m", {}, "bfloat16", max_num_seqs=1024),
    Model("m", {}, ""),
    "path",
    "",
    (),
    False,
    "FULL_AND_PIECEWISE",
)


def parts(run: RunFacts = RUN, method: Any = TRAINS, runner: Runner = V2) -> set[int]:
    """By their place in the table."""
    line = untried_in(run, method, runner, "cuda")
    return {at for at, part in enumerate(UNTRIED) if part.what in line}


def place(words: str) -> int:
    (at,) = [at for at, part in enumerate(UNTRIED) if words in part.what]
    return at


@pytest.mark.parametrize(
    ("change", "lost", "gained"),
    [
        ({"run": replace(RUN, eager=True)}, {"CUDA graphs"}, set()),
        ({"runner": V1}, {"compiled by Triton", "full CUDA graphs"}, {"more than 256 requests on the V1"}),
        (
            {"runner": V1, "run": replace(RUN, spec=SpecConfig.parse({"full_graphs": True}))},
            {"compiled by Triton", "full CUDA graphs"},
            {"more than 256 requests on the V1"},
        ),
        ({"run": replace(RUN, sleeps=True)}, set(), {"sleep and wake"}),
        ({"run": replace(RUN, target=replace(RUN.target, tensor_parallel=2))}, set(), {"tensor parallel ranks"}),
        (
            {"method": SimpleNamespace(draft=object(), harvest=None, settings={})},
            {"hidden states"},
            {"any method but"},
        ),
        (
            {"method": SimpleNamespace(draft=None, harvest=None, settings={"method": "ngram"})},
            {"hidden states", "trained draft", "scheduled ahead"},
            {"any method but"},
        ),
        (
            {"run": replace(RUN, spec=SpecConfig.parse({"train": False}))},
            {"hidden states", "trained draft"},
            {"any method but"},
        ),
        ({"method": None}, {"hidden states", "trained draft"}, {"any method but"}),
        ({"run": replace(RUN, spec=SpecConfig.parse({"self_test": False}))}, {"self-test"}, set()),
        ({"run": replace(RUN, graphs="PIECEWISE")}, {"full CUDA graphs"}, set()),
    ],
)
def test_a_run_is_told_what_it_would_be_the_first_to_use(change: Any, lost: set[str], gained: set[str]) -> None:
    assert parts(**change) == (parts() - {place(w) for w in lost}) | {place(w) for w in gained}
    assert lost <= {w for w in lost if place(w) in parts()}  # or the row would show nothing


def test_what_every_run_uses_is_said_of_every_run_and_each_part_of_some_run() -> None:
    least = parts(replace(RUN, eager=True), None, V1)
    assert {at for at, part in enumerate(UNTRIED) if not part.where} <= least
    most = replace(RUN, sleeps=True, target=replace(RUN.target, tensor_parallel=2))
    assert parts(most) | parts(most, runner=V1) | parts(most, None) == set(range(len(UNTRIED)))


def test_of_few_requests_at_once_nothing_is_said_of_many() -> None:
    few = replace(RUN, target=replace(RUN.target, max_num_seqs=256))
    assert parts(runner=V1) - parts(few, runner=V1) == {place("more than 256 requests on the V1")}


def test_a_run_on_a_cpu_is_the_first_to_use_nothing() -> None:
    assert untried_in(RUN, TRAINS, V1, "cpu") == NOTHING == untried_anywhere("cpu")


@pytest.mark.parametrize(
    ("runner", "device", "asked", "eager", "said"),
    [
        (V2, "cuda", "FULL_AND_PIECEWISE", False, "FULL_AND_PIECEWISE"),
        (V1, "cuda", "FULL_AND_PIECEWISE", False, "piecewise (vLLM's own choice on V1"),
        (V1, "cuda", "FULL_AND_PIECEWISE (vLLM's own choice)", False, "piecewise (vLLM's own choice on V1"),
        (V1, "cuda", "NONE", False, "NONE"),
        (V2, "cuda", "FULL", True, "none (enforce_eager)"),
        (V2, "cpu", "FULL", False, "none (vLLM's CPU build)"),
        (Runner(True, "V2 lacks it", refused=True), "cuda", "FULL", False, "none: vLLM will refuse to start"),
    ],
)
def test_the_graphs_follow_runner_device_and_options(
    runner: Runner, device: str, asked: str, eager: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for every_k in (True, False):
        monkeypatch.setattr(untried, "v2_takes_every_k", lambda every_k=every_k: every_k)
        found = graphs_of(runner, device, asked, eager)
        # not where vLLM would take V1 for another reason
        assert found.startswith(said) and (untried.SLOWER_PLAIN in found) == (
            said.startswith("piecewise") and not every_k
        )


def test_full_graphs_are_said_where_they_make_a_difference() -> None:
    found = [graphs_of(runner, "cuda", "FULL_AND_PIECEWISE", False, full=True) for runner in (V1, V2)]
    assert found == [
        "full where all requests have spec.k drafts, else piecewise (spec.full_graphs)",
        "FULL_AND_PIECEWISE",
    ]


def test_doctor_says_it_in_two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "without_accelerator", lambda: False)
    runners = {"eagle3": V2, "draft_model": V1, "suffix": Runner(True, "it lacks it", refused=True)}
    monkeypatch.setattr(untried, "METHODS", {name: {"method": name} for name in runners})
    monkeypatch.setattr(untried, "runner_of", lambda settings, device: runners[settings["method"]])
    runner, never = doctor.examine_engine()
    assert runner.name == "model runner" and never.state == "note"
    for said in (
        "V2: a test, with full and piecewise CUDA graphs (eagle3)",
        "V1: a test, with piecewise CUDA graphs alone, since k changes while it runs (draft_model)",
        "none, vLLM will refuse to start: it lacks it (suffix)",
    ):
        assert said in runner.detail
    assert all(part.what in never.detail and (part.where or "every run") in never.detail for part in UNTRIED)
    monkeypatch.setattr(doctor, "without_accelerator", lambda: True)
    runner, never = doctor.examine_engine()
    assert (runner.state, never.state) == ("ok", "ok") and "graphs" not in runner.detail
