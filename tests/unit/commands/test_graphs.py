"""check and doctor say which of vLLM's model runners and CUDA graphs a run gets, and where the list of what no GPU has run is."""

from __future__ import annotations

import re

import pytest
from builders.paths import ROOT

from spec_plugin.api.errors import SpecConfigError
from spec_plugin.commands import doctor, graphs
from spec_plugin.commands.graphs import NEVER_RUN, graphs_of
from spec_plugin.plan.model_runner import METHODS, Cluster, Runner

V1, V2 = Runner(False, "a test"), Runner(True, "a test")


def test_the_list_of_what_never_ran_on_a_gpu_is_where_it_is_said_to_be() -> None:
    (file, heading) = re.findall(r"(docs/\S+\.md)#(\S+)", NEVER_RUN["cuda"])[0]
    titles = re.findall(r"^#+ (.*)$", (ROOT / file).read_text(), re.MULTILINE)
    assert heading in [title.lower().replace(" ", "-") for title in titles]


@pytest.mark.parametrize(
    ("runner", "device", "said"),
    [
        (V2, "cuda", "full and piecewise, where the run asks for no fewer"),
        (V1, "cuda", "piecewise, where the run asks for no fewer (vLLM's own choice on V1"),
        (V2, "cpu", "none (vLLM's CPU build)"),
        (Runner(True, "V2 lacks it", refused=True), "cuda", "none: vLLM will refuse to start"),
    ],
)
def test_the_graphs_follow_runner_and_device(runner: Runner, device: str, said: str) -> None:
    for every_k, vllm in ((True, "0.26"), (False, "0.24.1")):
        found = graphs_of(runner, Cluster("H100" if device == "cuda" else "cpu", vllm))
        assert found.startswith(said)
        # not where vLLM would take V1 for another reason
        assert (graphs.SLOWER_PLAIN in found) == (said.startswith("piecewise") and not every_k)
        assert (graphs.UNTRIED_ON_V2 in found) == said.startswith("full"), "the worst that is known of it is said"


def test_a_cluster_is_judged_by_its_own_card_and_release_not_by_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a laptop with vLLM's CPU build, once: no CUDA graphs, and nothing that never ran on a GPU."""
    monkeypatch.setattr("spec_plugin.plan.model_runner.device_type", lambda: "cpu")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")  # of this machine
    for vllm, on_v2 in (
        ("0.24.1", set()),
        ("0.26", {"eagle3", "mtp", "frozen: EAGLE-1 and EAGLE-3", "frozen: DFlash"}),
    ):
        cluster = Cluster("H100", vllm)
        assert {name for name, settings in METHODS.items() if cluster.runner_of(settings).v2} == on_v2
    assert (
        Cluster("H100", "0.24").runner_of(METHODS["eagle3"]).words == "V1: V2 0.24 lacks a k that changes while it runs"
    )
    assert (Cluster().device_type, Cluster("H100").device_type, Cluster("cpu").device_type) == ("cpu", "cuda", "cpu")
    with pytest.raises(SpecConfigError, match=r"--vllm newest: give a release, such as 0\.26"):
        Cluster("H100", "newest")


def test_doctor_says_it_in_two_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    runners = {"eagle3": V2, "draft_model": V1, "suffix": Runner(True, "it lacks it", refused=True)}
    monkeypatch.setattr(graphs, "METHODS", {name: {"method": name} for name in runners})
    monkeypatch.setattr(Cluster, "runner_of", lambda _, settings: runners[settings["method"]])
    runner, never = doctor.examine_engine(Cluster("H100"))
    assert runner.name == "model runner" and never.state == "note"
    for said in (
        "V2: a test, with full and piecewise CUDA graphs (eagle3)",
        "V1: a test, with piecewise CUDA graphs (draft_model)",
        "none, vLLM will refuse to start: it lacks it (suffix)",
    ):
        assert said in runner.detail
    assert never.detail == NEVER_RUN["cuda"]
    runner, never = doctor.examine_engine(Cluster("cpu"))
    assert (runner.state, never.state) == ("ok", "ok") and "graphs" not in runner.detail


def test_doctor_tells_of_another_card_and_release_than_this_machine_s() -> None:
    old, new = (doctor.examine_engine(Cluster("H100", vllm))[0].detail for vllm in ("0.24", "0.26"))
    assert "V1: V2 0.24 lacks a k that changes" in old and "V2: vLLM's own choice" not in old
    assert "V2: vLLM's own choice, with full and piecewise CUDA graphs (eagle3" in new
