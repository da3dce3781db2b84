"""``spec-plugin project``: what it prints, what of a run it takes, and what it refuses."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from builders.paths import ROOT
from click.testing import CliRunner
from spec_plugin_projection.evidence import read_calibration, read_run

from spec_plugin.api.errors import SpecConfigError
from spec_plugin.api.events import SelfTestReport, StepTiming
from spec_plugin.commands.cli import main
from spec_plugin.policy.break_even.controller import BreakEvenController

ASKED = ["project", "--model", "Qwen3-8B", "--card", "H100", "--gpus", "8", "--batch", "128", "--mean", "1500"]


def run_command(*options: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, [*ASKED, *options])
    return result.exit_code, result.output


def test_it_prints_a_line_for_each_k_with_ranges_and_what_it_rests_on() -> None:
    began = time.monotonic()
    code, text = run_command("--acceptance", "3=2.8", "--k", "3", "--k", "5")
    assert code == 0, text
    assert time.monotonic() - began < 10
    assert "plain" in text and "by batch size" in text
    assert "arXiv 2601.11580" in text and "NVIDIA data sheet: H100 SXM" in text
    assert "not covered" in text


def test_numbers_for_programs_are_json() -> None:
    code, text = run_command("--acceptance", "3=2.8", "--k", "3", "--json")
    assert code == 0
    found = json.loads(text)
    assert [row["k"] for row in found["rows"]] == ["plain", 3, "by batch size"]
    assert found["asked"]["model"] == "Qwen3-8B"
    assert found["schema"] == 1 and found.keys() == {"schema", "asked", "plain", "rows"}
    promised = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    spans = {"rollout_s", "rollout_speedup", "step_s", "step_speedup", "exposed_s"}
    for row in found["rows"]:
        assert row.keys() == {"k", "tokens", *spans}
        assert all(row[name].keys() == {"typical", "low", "high"} for name in spans)
    assert not [
        key
        for key in (*found, *found["plain"], *found["rows"][0], "typical", "low", "high")
        if f"`{key}`" not in promised
    ]


def test_the_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, text = run_command("--acceptance", "3=2.8", "--k", "3", "--out", str(tmp_path / "p.png"))
    assert code == 0, text
    assert (tmp_path / "p.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--model", "Qwen9"], "neither known nor a folder"),
        (["--card", "TPU"], "'TPU' is not known"),
        (["--batch", "-4"], "--batch -4: at least 1"),
        (["--acceptance", "3=5"], "a step emits 1 to 4"),
        (["--acceptance", "three"], "give K=TOKENS"),
        (["--acceptance", ""], "give K=TOKENS"),
        (["--lengths", "50=ten"], "give PERCENTILE=TOKENS"),
        (["--lengths", "/nowhere"], "a JSON list of tokens"),
        (["--mean", "90000"], "between 1 and the longest"),
        (["--from", "/nowhere"], "--from /nowhere: there is no such file or folder"),
        (["--calibration", "/nowhere"], "a JSON list of objects"),
        (["--model", "Llama-3.1-405B"], "do not fit"),
        (["--draft-share", "2"], "from 0 to 1"),
        (["--draft-share", "nan"], "from 0 to 1"),
        (["--lag", "-1"], "--lag -1: at least 0"),
        (["--prompt", "-1"], "--prompt -1: at least 0"),
        (["--logprob-passes", "-1"], "--logprob-passes -1: at least 0"),
        (["--mean", "nan"], "between 1 and the longest"),
        (["--mean", "0"], "between 1 and the longest"),
        (["--longest", "inf"], "between 1 and the longest"),
        (["--lengths", "50=100,99=nan"], "that do not fall"),
        (["--lengths", "nan=100,99=200"], "that do not fall"),
        (["--tp", "3", "--gpus", "9"], "--tp 3: the 32 attention heads of Qwen3-8B do not divide by it"),
        (["--acceptance", "3=nan"], "--acceptance 3=nan"),
        (["--acceptance", "3=2,3=2.5"], "k=3 was given 2 tokens before"),
        (["--lengths", "50=1000,100=500000"], "do not fit into the KV cache of an engine on 1 H100"),
        (["--vllm", "new"], "--vllm new: give a release"),
        (["--batch", "70000"], "at most 65536 responses are simulated"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(options: list[str], word: str) -> None:
    given = options if "--acceptance" in options else ["--acceptance", "3=2.8", *options]
    code, text = run_command(*given)
    assert code == 2
    assert word in text
    assert len(text.strip().splitlines()) == 1 and text.startswith("Error: ")


def test_without_acceptance_it_says_what_to_give() -> None:
    code, text = run_command()
    assert code == 2 and "give --acceptance" in text


def metrics(step: int, **ours: float) -> str:
    data = {f"actor/spec/{name}": value for name, value in ours.items()}
    theirs = {"timing_s/old_log_prob": 2.0, "timing_s/update_actor": 6.0, "timing_s/update_weights": 0.5}
    sizes = {
        "perf/total_num_tokens": 1000,
        "response_length/mean": 40.0,
        "response_length/max": 60,
        "prompt_length/mean": 10,
    }
    return json.dumps({"step": step, "data": data | theirs | sizes})


@pytest.fixture
def a_run(tmp_path: Path) -> Path:
    late = {
        "acceptance_length": 2.6,
        "acceptance_pos_0": 0.8,
        "acceptance_pos_1": 0.5,
        "acceptance_pos_2": 0.3,
        "acceptance_pos_3": 0.0,
        "generation_s": 4.0,
        "k_b1": 3.0,
        "k_b8": 1.0,
        "break_even_b1": 1.4,
        "break_even_b8": 1.2,
    }
    early = [metrics(step, acceptance_length=1.0, generation_s=9.0) for step in (1, 2, 3)]
    lines = [*early, *(metrics(step, **late) for step in (4, 5, 6)), '{"step": 7, "da']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_a_run_gives_acceptance_break_even_and_stages_of_its_last_half(a_run: Path) -> None:
    found = read_run(a_run)
    assert found.acceptance == pytest.approx({1: 1.8, 2: 2.3, 3: 2.6})
    times = found.times
    assert times is not None
    assert times.break_even == {1: (3, 1.4), 8: (1, 1.2)}
    assert (times.logprob_s, times.training_s, times.prepare_s) == (0.002, 0.006, 0.5)
    assert (times.generation_s, times.k) == (4.0, 3)  # of the first three steps: 9 s
    assert (times.work.responses, times.work.mean, times.work.longest, times.work.prompt) == (20, 40, 60, 10)


def test_the_table_says_what_of_a_run_it_took_and_what_not(a_run: Path) -> None:
    code, text = run_command("--from", str(a_run), "--k", "3")
    assert code == 0, text
    assert "measured: tokens a step (k=1: 1.80, k=2: 2.30, k=3: 2.60)" in text
    assert "not used: the times of" in text  # an 8B model on eight cards is not what took 4 s for 800 tokens


def test_a_run_of_the_deployment_that_is_asked_for_gives_its_times(a_run: Path) -> None:
    lines = (a_run / "metrics.jsonl").read_text().replace('generation_s": 4.0', 'generation_s": 0.3')
    (a_run / "metrics.jsonl").write_text(lines)
    code, text = run_command("--from", str(a_run), "--k", "3")
    assert code == 0, text
    assert "rollouts of 0.3 s (20 responses, k=3), to which all steps are scaled" in text
    assert "seconds of training" in text and "arXiv 2205.05198" not in text


def test_a_run_without_the_flag_and_an_empty_one_are_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "data": {"timing_s/gen": 3}}\n')
    with pytest.raises(SpecConfigError, match="no step of it has a metric of a run with the flag"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(SpecConfigError, match="no step of a trainer is in it yet"):
        read_run(tmp_path)


def test_a_folder_that_report_reads_is_read_and_of_several_runs_one_is_to_be_named(tmp_path: Path) -> None:
    """Such as of TRL's checkpoints, whose file has all steps so far."""
    steps = [
        {"step": s, "step_time": 9.0, "spec/acceptance_length": 2.5, "spec/acceptance_pos_0": 0.9, "spec/k_b1": 1}
        for s in (1, 2, 3, 4)
    ]
    for run in ("one", "other"):
        (tmp_path / run / "checkpoint-4").mkdir(parents=True)
        (tmp_path / run / "checkpoint-4" / "trainer_state.json").write_text(json.dumps({"log_history": steps}))
    assert read_run(tmp_path / "one").acceptance == pytest.approx({1: 1.9})
    code, text = run_command("--from", str(tmp_path / "one"), "--k", "1")
    assert code == 0 and "measured: tokens a step (k=1: 1.90)" in text, text
    with pytest.raises(SpecConfigError, match="several runs with the flag are in it: name one of one, other"):
        read_run(tmp_path)


def test_a_calibration_is_read_and_used(tmp_path: Path) -> None:
    steps = [
        {"batch": b, "k": k, "paused": k == 0, "seconds": 0.01 + 0.001 * b + 0.002 * k, "steps": 20, "context": 50.0}
        for b in (1, 8)
        for k in (0, 1, 3)
    ]
    file = tmp_path / "steps.json"
    file.write_text(json.dumps(steps))
    assert len(read_calibration(file)) == 6
    code, text = run_command("--acceptance", "3=2.8", "--k", "3", "--calibration", str(file))
    assert code == 0, text
    assert "all steps of the engine" in text and "while weights are read" not in text


def test_a_toys_calibration_is_not_taken_for_an_8b_on_an_h100(tmp_path: Path) -> None:
    """Steps of a millisecond, where reading the weights alone takes six."""
    steps = [
        {"batch": b, "k": k, "paused": k == 0, "seconds": 1e-3 * (1 + 0.01 * b + 0.1 * k), "steps": 20, "context": 50.0}
        for b in (1, 8)
        for k in (0, 1, 3)
    ]
    (tmp_path / "steps.json").write_text(json.dumps(steps))
    code, text = run_command("--acceptance", "3=2.8", "--calibration", str(tmp_path / "steps.json"))
    assert code == 2 and "times what those of Qwen3-8B on 1 H100 take by the data sheet" in text, text


@pytest.mark.parametrize(("vllm", "runner", "cost"), [("0.24", "V1", "0.5 to 8 ms"), ("0.26", "V2", "0.05 to 2.5 ms")])
def test_runner_and_graphs_are_those_that_check_names_and_so_is_what_the_flag_costs(
    vllm: str, runner: str, cost: str
) -> None:
    code, text = run_command("--acceptance", "3=2.8", "--k", "3", "--vllm", vllm)
    assert code == 0 and f"model runner: {runner}" in text
    check = CliRunner().invoke(main, ["check", "--card", "H100", "--vllm", vllm, "openrlhf"]).output.splitlines()
    for name in ("model runner", "CUDA graphs"):
        said = next(line.strip() for line in check if line.strip().startswith(name))
        assert f"{name}: {said.removeprefix(name).strip()}" in text
    assert f"with the flag each step takes {cost} longer, drafting or not" in text
    assert ("nobody has measured V2 on a card" in text) == (runner == "V2")


def test_v2_with_full_graphs_is_faster_and_programs_are_told_the_runner() -> None:
    found = [
        json.loads(run_command("--acceptance", "3=2.8", "--k", "3", "--json", "--vllm", v)[1]) for v in ("0.24", "0.26")
    ]
    assert [one["asked"]["vllm_runner"] for one in found] == ["V1", "V2"]
    v1, v2 = (one["rows"][1]["rollout_speedup"]["typical"] for one in found)
    assert v2 > v1 and found[0]["rows"][0] == found[1]["rows"][0]


def test_how_hopeful_it_was_of_other_systems_is_what_the_benchmark_found() -> None:
    results = json.loads((ROOT / "examples" / "bench" / "results" / "projection.json").read_text())["results"]
    alone = [row for row in results if row["how"] == "predicted from sizes alone" and ", k=3," in row["name"]]
    known, said = (
        " and ".join(f"{row[key]:.{digits}f}x" for row in alone) for key, digits in (("known", 2), ("predicted", 1))
    )
    text = run_command("--acceptance", "3=2.8", "--k", "3")[1]
    assert f"{known} where this, without the flag's own cost, says {said}" in text


def test_a_card_that_was_never_measured_is_said_to_rest_on_its_data_sheet() -> None:
    assert "for H200 there is its data sheet" in run_command("--acceptance", "3=2.8", "--k", "3", "--card", "H200")[1]
    assert "there is its data sheet" not in run_command("--acceptance", "3=2.8", "--k", "3")[1]


def test_what_the_controller_saves_with_a_checkpoint_is_a_calibration(tmp_path: Path) -> None:
    steps = tuple(StepTiming(b, k, k == 0, 0.01 + 0.001 * b + 0.002 * k, 20, 50.0) for b in (1, 8) for k in (0, 1, 3))
    controller = BreakEvenController()
    controller.spec_save(tmp_path)
    assert not list(tmp_path.iterdir()), "nothing was measured"
    controller.spec_engine_ready(SelfTestReport((), 1.0, steps))
    controller.spec_save(tmp_path)
    assert tuple(read_calibration(tmp_path / "calibration.json")) == steps
    assert [file.name for file in tmp_path.iterdir()] == ["calibration.json"]
    code, text = run_command("--acceptance", "3=2.8", "--k", "3", "--calibration", str(tmp_path / "calibration.json"))
    assert code == 0 and "all steps of the engine" in text, text


def test_a_calibration_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    steps = [{"batch": 1, "k": 0, "paused": True, "seconds": 0.01, "steps": 20, "context": 50.0}]
    (tmp_path / "steps.json").write_text(json.dumps(steps))
    code, text = run_command("--acceptance", "3=2.8", "--calibration", str(tmp_path / "steps.json"))
    assert code == 2 and "no speculating step was timed" in text


@pytest.mark.parametrize("content", ["{}", "[]", "[1]", '[{"batch": 1}]', "TEXT"])
def test_what_is_no_calibration_is_refused(tmp_path: Path, content: str) -> None:
    text = (
        json.dumps([{"batch": "a", "k": 0, "paused": True, "seconds": 1, "steps": 1}]) if content == "TEXT" else content
    )
    (tmp_path / "steps.json").write_text(text)
    with pytest.raises(SpecConfigError, match="a JSON list of objects") as caught:
        read_calibration(tmp_path / "steps.json")
    assert "\n" not in str(caught.value)


def test_metrics_that_are_no_numbers_are_passed_over(a_run: Path) -> None:
    odd = metrics(7).replace('"timing_s/update_actor": 6.0', '"timing_s/update_actor": "n/a"')
    broken = json.loads(odd)
    broken["data"] |= {"spec/acceptance_length": 2.0, "spec/acceptance_pos_0": None, "spec/k_b1": "three"}
    with (a_run / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps(broken) + "\n\x00\n")
    assert read_run(a_run).acceptance[1] == pytest.approx(1.8)


def test_lengths_come_from_a_file_whatever_its_path_is(tmp_path: Path) -> None:
    file = tmp_path / "lr=1e-6" / "lengths.json"
    file.parent.mkdir()
    file.write_text(json.dumps([1200, 1300, 1500]))
    code, text = run_command("--acceptance", "3=2.8", "--k", "3", "--lengths", str(file))
    assert code == 0, text
    assert run_command("--acceptance", "3=2.8", "--lengths", "half=100")[1].count("give PERCENTILE=TOKENS") == 1


def test_a_calibration_that_says_a_paused_draft_drafted_is_read_as_drafts(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    rows = [{"batch": 1, "k": k, "paused": True, "seconds": s, "steps": 5} for k, s in ((0, 0.01), (3, 0.02))]
    file.write_text(json.dumps(rows))
    code, text = run_command("--acceptance", "3=2.8", "--k", "3", "--calibration", str(file))
    assert code == 0, text
