from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from builders.report import DATA
from click.testing import CliRunner

from spec_plugin.commands.cli import main
from spec_plugin.commands.report import make_report, to_html
from spec_plugin.commands.report.build import Report
from spec_plugin.commands.report.run import LoggedRun

RUNS = [DATA / name for name in ("verl-flag", "verl-plain", "trl-untrained")]
SVG = re.compile(r"<svg .*?</svg>", re.DOTALL)


def invoke(*arguments: object):
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, ["report", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture(scope="module")
def page() -> str:
    return to_html(make_report(RUNS))


class Balanced(HTMLParser):
    """Fails where a tag is closed that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag


def test_the_page_is_whole_and_its_figures_are_xml(page):
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    figures = SVG.findall(page)
    assert len(figures) >= 16
    for figure in figures:
        ElementTree.fromstring(figure)


def test_the_page_needs_no_network_and_runs_nothing(page):
    assert "<script" not in page and "@import" not in page and "url(http" not in page
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:)""", page)


def test_ids_of_one_figure_are_not_those_of_another(page):
    ids = [set(re.findall(r'<(?:clipPath|path|image) [^>]*?id="(\w+)"', figure)) for figure in SVG.findall(page)]
    assert all(ids)
    assert sum(map(len, ids)) == len(set().union(*ids))


def test_figures_take_their_colours_from_the_page_so_that_they_follow_light_and_dark(page):
    assert not re.search(r"#00f0\w\w", page)  # a colour that stands for a variable
    for figure in SVG.findall(page):
        fixed = set(re.findall(r"(?:fill|stroke): (#\w+)", figure)) - {"#ffffff"}  # on a heat map
        assert not fixed, fixed
    used = set(re.findall(r"var\((--\w+)\)", page))
    light, dark = (
        set(re.findall(r"(--\w+):", part)) for part in page.partition("@media (prefers-color-scheme: dark)")[::2]
    )
    assert used <= light and used <= dark


def test_figures_are_the_same_each_time(page):
    assert to_html(make_report(RUNS)) == page


def test_what_a_log_says_is_text_and_never_markup():
    bad = "<script>alert(1)</script>"
    run = LoggedRun(bad, bad, {1: {"spec/on": 1.0, "step_s": 1.0}}, (bad,), (bad,))
    other = LoggedRun("other", "", {1: {"step_s": 1.0}, 2: {"step_s": 2.0}})
    page = to_html(Report((run, other), bad, (), (bad,), (bad,)))
    assert bad not in page and page.count("&lt;script&gt;") >= 6


def test_json_holds_everything_and_only_finite_numbers():
    done = invoke(*RUNS[:2], "--json")
    table = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(name))
    flag, plain = table["runs"]
    assert (flag["name"], flag["plugin"], plain["plugin"], table["base"]) == ("verl-flag", True, False, "verl-plain")
    assert [span["state"] for span in flag["speculation"]] == ["off", "on"]
    assert flag["steps"][7]["spec/acceptance_length"] == pytest.approx(
        json.loads((DATA / "verl-flag/metrics.jsonl").read_text().splitlines()[7])["data"][
            "actor/spec/acceptance_length"
        ]
    )
    assert {c["what"] for c in table["comparisons"]} >= {"whole step"}


def test_the_command_writes_one_file_and_says_where(tmp_path):
    out = tmp_path / "page.html"
    done = invoke(DATA / "verl-flag", "--out", out)
    assert done.exit_code == 0 and f"the page: {out}" in done.output
    assert "speed-up of decoding, by the engine's own step times: 2.44x (2.38-2.46)" in done.output
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_a_run_that_cannot_be_read_does_not_hide_the_others(tmp_path):
    done = invoke(DATA / "verl-plain", tmp_path / "gone", "--out", tmp_path / "page.html")
    assert done.exit_code == 0 and "not shown:" in done.output
    assert "there is no such file or folder" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no step of a trainer is in it yet"),
        ("\x00\x01 nothing of a trainer\n", "and no console logs"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, text, says):
    log = tmp_path / "train.log"
    log.write_text(text)
    done = invoke(log, "--out", tmp_path / "page.html")
    assert done.exit_code == 2 and says in done.output
    assert done.output.count("\n") == 1 and not (tmp_path / "page.html").exists()


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path):
    done = invoke(DATA / "verl-plain", "--out", tmp_path / "no" / "page.html")
    assert done.exit_code == 2 and done.output.count("\n") == 1 and "No such file or directory" in done.output


def test_without_matplotlib_the_numbers_are_still_there(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = invoke(DATA / "verl-flag", "--out", tmp_path / "page.html")
    assert done.exit_code == 2 and "pip install jinja2 matplotlib, or take the numbers" in done.output
    assert invoke(DATA / "verl-flag", "--json").exit_code == 0


def test_it_imports_no_trainer_no_engine_and_no_torch():
    code = (
        "import sys; from spec_plugin.commands.report import make_report, to_html; from pathlib import Path;"
        f"to_html(make_report([Path({str(DATA / 'verl-flag')!r})]));"
        "print([m for m in ('torch', 'vllm', 'ray', 'verl', 'openrlhf', 'spec_plugin_verl') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
