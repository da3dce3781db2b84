"""What the flag may not change is compared with a run without it: options of the engine, and the first phase's requests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders.traces import Trace
from spec_plugin_conformance import plain, unchanged
from spec_plugin_conformance.journal import Journal, read_trace

OPTIONS = {
    "cache.enable_prefix_caching": "True",
    "model.dtype": "torch.float32",
    "parallel.data_parallel_master_port": "1",
}
PROMPTS = ([5, 6], [5, 6], [7, 8, 9])


def run(prompts: Any = PROMPTS, asked: Any = None, **options: str) -> list[dict[str, Any]]:
    trace = Trace(steps=0)
    trace.find("engine_configured")["options"] = OPTIONS | options
    for prompt in prompts:
        what = {
            "began": 0.0,
            "sequences": [[*prompt, 1]],
            "prompt": len(prompt),
            "asked": {"max_tokens": 8, **(asked or {})},
        }
        trace.add("engine_request", engine=0, test=False, **what)
    trace.add("spec_rollout_end")
    return trace.events


def test_what_drafts_need_may_differ() -> None:
    flag = run(**{"cache.num_gpu_blocks": "7", "compilation.mode": "3", "parallel.data_parallel_master_port": "2"})
    assert unchanged.options_changed(flag, run(**{"cache.num_gpu_blocks": "9"})) == []


@pytest.mark.parametrize(
    ("name", "value"), [("cache.enable_prefix_caching", "False"), ("model.dtype", "torch.bfloat16")]
)
def test_an_option_that_comes_with_the_flag_is_named(name: str, value: str) -> None:
    (said,) = unchanged.options_changed(run(**{name: value}), run())
    assert said == f"the engine has {name}={value}, without the flag {OPTIONS[name]}"


def test_the_same_requests_in_another_order_are_the_same() -> None:
    assert unchanged.requests_changed(run(PROMPTS[::-1]), run()) == []


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (PROMPTS[:2], "of the 3 requests without the flag 1 are missing"),
        ((*PROMPTS, [5, 6]), "1 are there beside them"),
        (([5, 6], [7, 8, 9], [7, 8, 9]), "1 are missing"),
        (([5, 6], [5, 6], [7, 8]), "1 are missing"),
    ],
    ids=["left out", "more", "a group torn", "cut"],
)
def test_prompts_that_are_others_are_told(prompts: Any, said: str) -> None:
    (found,) = unchanged.requests_changed(run(prompts), run())
    assert said in found


def test_a_further_turn_goes_on_from_what_was_sampled_and_is_not_compared() -> None:
    assert unchanged.requests_changed(run((*PROMPTS, [5, 6, 1, 30])), run((*PROMPTS, [7, 8, 9, 1, 31]))) == []
    assert unchanged.requests_changed(run((*PROMPTS, [5, 6, 2, 30])), run()), "of no answer: another prompt"


def test_what_the_run_without_the_flag_asks_behind_its_one_step_is_not_compared() -> None:
    """OpenRLHF asks for the next rollout before it counts steps: a slow end shows some of it, or all."""
    went_on, later = run(), run(([9, 9], [9, 9], [9, 9]))
    for event in (e for e in later if e["hook"] == "engine_request"):
        event["began"] = 2.0 * went_on[-1]["time"]
        event["time"] = event["began"] + 1.0
    assert unchanged.requests_changed(run(), went_on + later) == []
    (found,) = unchanged.requests_changed(run(PROMPTS[:2]), went_on + later)
    assert "of the 3 requests without the flag 1 are missing" in found, "those of one phase belong together"


def test_what_is_asked_for_a_prompt_belongs_to_it() -> None:
    (found,) = unchanged.requests_changed(run(asked={"n": 2}), run())
    assert "3 are missing" in found and "3 are there beside them" in found


def test_a_run_that_nobody_watched_shows_nothing() -> None:
    assert unchanged.options_changed(run(), []) and unchanged.requests_changed(run(), [])


def test_the_watcher_is_inert_but_in_the_run_that_names_a_folder(tmp_path: Path) -> None:
    code = (
        "import sys; from spec_plugin_conformance.plain import watch; before = {*sys.modules}; watch(); "
        "print({*sys.modules} - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_it_watches_each_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("spec_plugin_conformance.watch.watch_requests", lambda *given: seen.append(given))
    monkeypatch.setenv(plain.FOLDER, str(tmp_path / "records"))
    plain.watch()
    plain.watch()
    assert len(seen) == 1
    seen[0][1]("engine_request", test=False)
    assert [e["hook"] for e in read_trace(tmp_path / "records")] == ["engine_request"]


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    Journal(tmp_path).write("a")
    (file,) = tmp_path.glob("*.jsonl")
    file.write_text(file.read_text() + '{"hook": "b", "ti')
    assert [e["hook"] for e in read_trace(tmp_path)] == ["a"]
