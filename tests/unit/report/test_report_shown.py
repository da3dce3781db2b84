"""What the report's page shows of long runs, of failures and of runs side by side, and what its JSON promises."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path

import pytest
from builders.paths import ROOT
from builders.report import DATA
from click.testing import CliRunner

from spec_plugin.commands.cli import main
from spec_plugin.commands.report import make_report, to_html
from spec_plugin.commands.report.figures import draw
from spec_plugin.commands.report.panels import Line, Panel, drafted_ks, panels_of, together
from spec_plugin.commands.report.states import StateSpan, spans_of

RUNS = [DATA / name for name in ("verl-flag", "verl-plain", "trl-untrained")]


def long_run(folder: Path, steps: int) -> Path:
    record = json.loads((DATA / "verl-flag/metrics.jsonl").read_text().splitlines()[-1])
    noise = random.Random(0)

    def line(step: int) -> str:
        data = {n: v if float(v).is_integer() else v * noise.uniform(0.9, 1.1) for n, v in record["data"].items()}
        return json.dumps({"step": step, "data": data}) + "\n"

    (folder / "metrics.jsonl").write_text("".join(map(line, range(1, steps + 1))))
    return folder


def test_a_long_run_takes_as_much_longer_as_it_has_steps_and_a_browser_takes_its_page(tmp_path):
    seconds = {}
    for steps in (100, 1000, 5000):  # the first one imports
        (tmp_path / str(steps)).mkdir()
        begin = time.process_time()
        page = to_html(make_report([long_run(tmp_path / str(steps), steps)]))
        seconds[steps] = time.process_time() - begin
    assert seconds[5000] < 12 * seconds[1000], "25 times would be its square"
    assert len(page) < 900_000


def test_after_a_failure_nothing_is_shown_as_drafted():
    (run,) = make_report([DATA / "trl-untrained"]).runs
    assert run.series("spec/k_b4")
    drafted = drafted_ks(run, spans_of(run))
    assert drafted.keys() == run.family("spec/k_b").keys()
    assert not any(drafted.values())


def test_of_one_run_alone_what_its_trainer_logs_is_drawn_too_and_nothing_twice():
    (run,) = make_report(RUNS[:1]).runs
    own = {panel.title for panel in panels_of(run, spans_of(run))}
    alone = [panel.title for panel in together([run])]
    assert {"Whole step", "Reward"} <= set(alone) and not own.intersection(alone)


@pytest.mark.parametrize("spans", [1, 2, 1500])
def test_a_run_that_goes_on_and_off_is_shaded_in_one_shape(spans):
    """A shape for each span took twelve seconds of a page; the axis is as long as the run."""
    panel = Panel("Loss", "nats", (Line({3: 1.0, 4: 2.0}, "loss"),))
    states = [StateSpan(i, i, ("on", "off")[i % 2], None, "") for i in range(1, spans + 1)]
    begin = time.process_time()
    figure = draw(panel, "", states)
    assert time.process_time() - begin < 2.0
    assert figure.count("PolyCollection_") == 1


def test_the_first_step_which_starts_things_up_flattens_no_figure_of_times():
    runs = make_report(RUNS[:2]).runs
    (steps,) = (panel for panel in together(runs) if panel.title == "Whole step")
    assert [min(line.series) for line in steps.lines] == [2, 2]


def test_times_of_several_runs_are_drawn_from_zero():
    runs = make_report(RUNS[:2]).runs
    panels = {panel.title: draw(panel, "") for panel in together(runs)}
    assert all(re.search(r">0(\.0)?</text>", panels[title]) for title in ("Whole step", "Generation, per token"))


def test_the_keys_of_the_json_are_those_that_the_documents_promise():
    table = json.loads(CliRunner().invoke(main, ["report", *map(str, RUNS), "--json"], catch_exceptions=False).stdout)
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    promised = {
        "": {"schema", "base", "problems", "caveats", "comparisons", "runs"},
        "comparisons": {"run", "base", "what", "ratio", "first", "last"},
        "runs": {"name", "trainer", "plugin", "sources", "remarks", "steps"} | {"earned", "speculation", "findings"},
        "speculation": {"first", "last", "state", "reason", "why"},
        "findings": {"level", "text", "step"},
    }
    assert table["schema"] == 2 and table.keys() == promised[""]
    assert table["comparisons"][0].keys() == promised["comparisons"]
    assert table["comparisons"][0]["ratio"].keys() == {"median", "low", "high", "count"}
    for run in table["runs"]:
        assert run.keys() == promised["runs"]
        for name in ("speculation", "findings"):
            assert all(entry.keys() == promised[name] for entry in run[name])
    part = text.partition("<!-- report-json:begin -->")[2].partition("<!-- report-json:end -->")[0]
    for keys in promised.values():
        assert not [key for key in keys if not re.search(rf"`(runs\[\]\.)?{key}`", part)]
