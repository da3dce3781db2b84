"""coverage.py's counting, its data, and the documents' tables, which are its results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from builders.paths import ROOT
from click.testing import CliRunner
from parts import ACTORS, SHAPES
from spec_plugin_conformance.targets import tiny_targets

from draft_training import DraftConfig, DraftConfigError
from examples.bench import coverage
from spec_plugin.commands.forecast import Judgement
from spec_plugin.plan.engine_class import engine_class, unreadable
from spec_plugin.plan.refusals import Objection
from spec_plugin.plan.run_plan import Model

TRAINERS = {
    "verl-release": "verl_release_examples.jsonl",
    "verl": "verl_examples.jsonl",
    "openrlhf": "openrlhf_scripts.jsonl",
}
LINES = {"verl_release_examples.jsonl": 91, "verl_examples.jsonl": 88, "openrlhf_scripts.jsonl": 8}


def row(script: str, *reasons: str, trainer: tuple[str, ...] = (), judged: bool = True) -> coverage.Row:
    return coverage.Row(script, reasons, trainer, reasons, (), ("tp2", "packed"), "qwen3", judged)


ROWS = [
    row("good"),
    row("old", "odd key", trainer=("odd key",)),
    row("megatron", "megatron"),
    row("both", "megatron", "moe"),
    row("nothing known", "odd key", trainer=("odd key",), judged=False),
]


def test_a_reason_counts_every_line_that_has_it_and_costs_those_that_have_no_other() -> None:
    assert coverage.by_reason(ROWS) == {"odd key": 2, "megatron": 2, "moe": 1}
    assert coverage.alone_costs(ROWS) == {"odd key": 1, "megatron": 1}


def test_the_table_tells_our_refusals_from_the_trainers_own() -> None:
    first, *rest = coverage.main_table(ROWS)
    assert first.startswith("accepted 1 of 5; 2 but for")
    assert "| megatron | 2 | 1 |" in rest and "| moe | 1 | 0 |" in rest


def test_each_accepted_script_is_listed_with_its_shapes() -> None:
    lines = coverage.shape_table(ROWS)
    assert "| good | tp2 packed | qwen3 |" in lines and any(line.startswith("| old (rewritten") for line in lines)
    assert not any("megatron" in line or "nothing known" in line for line in lines)


def test_a_line_is_judged_by_the_check_of_its_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def judge_run(trainer: str, arguments: list[str], find: Any) -> Judgement:
        asked.append((trainer, arguments, find("org/Qwen3-8B").config["model_type"]))
        objection = Objection("k", "1", "a reason", "why", "what else")
        return Judgement("verl", (objection, objection), {"shape": "x"})

    monkeypatch.setattr(coverage, "judge_run", judge_run)
    monkeypatch.setattr(coverage, "find_check", lambda trainer: None)
    commands, out = tmp_path / "commands.jsonl", tmp_path / "out.json"
    commands.write_text(json.dumps({"script": "s", "module": "verl.trainer.main_ppo", "args": ["x=1"]}) + "\n\n")
    done = CliRunner().invoke(coverage.main, ["--commands", str(commands), "--json", str(out)])
    assert done.exit_code == 0 and "accepted 0 of 1" in done.stdout, done.output
    assert asked == [("verl", ["-m", "verl.trainer.main_ppo", "x=1"], "qwen3")]
    (table,) = json.loads(out.read_text())
    assert table["reasons"] == ["a reason"] and len(table["objections"]) == 2


def test_a_module_that_no_adapter_knows_is_a_row_of_its_own(tmp_path: Path) -> None:
    commands, out = tmp_path / "commands.jsonl", tmp_path / "out.json"
    commands.write_text(json.dumps({"script": "s", "module": "nobodys.main", "args": ["x=1"]}))
    done = CliRunner().invoke(coverage.main, ["--commands", str(commands), "--json", str(out)])
    assert done.exit_code == 0 and "| no adapter for nobodys | 1 | 0 |" in done.stdout, done.output
    (table,) = json.loads(out.read_text())
    assert not table["judged"] and "'nobodys'" in table["objections"][0]


def test_a_model_is_looked_for_in_what_was_given_then_on_disk_then_in_the_table(
    tmp_path: Path, monkeypatch: Any
) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "given"}')
    monkeypatch.setattr(coverage, "find_model", lambda name: Model(name, None, "not here"))
    find = coverage.finder({"B": file}, {"B": {"model_type": "table"}, "C": {"model_type": "table"}})
    assert [(find(n).config or {}).get("model_type") for n in ("A/B", "A/C", "A/D")] == ["given", "table", None]


def test_a_model_config_without_a_name_is_refused(tmp_path: Path) -> None:
    commands = tmp_path / "commands.jsonl"
    commands.write_text("")
    done = CliRunner().invoke(coverage.main, ["--commands", str(commands), "--model-config", "config.json"])
    assert done.exit_code == 2 and "NAME=FILE" in done.output


def test_the_table_of_models_has_the_sizes_of_each_that_a_draft_can_read_and_names_the_class_of_all() -> None:
    readable = 0
    for name, config in json.loads(coverage.FAMILIES.read_text()).items():
        if engine_class(config) is None or len(config) == 1:
            continue  # named, and not filled in
        readable += unreadable(config) is None
        if unreadable(config) is None:
            made = DraftConfig.from_target(config)
            assert 1e7 < made.parameters < 2e9 and made.num_kv_heads <= 64, name
        else:
            with pytest.raises(DraftConfigError, match="lacks"):  # nobody needs its sizes
                DraftConfig.from_target(config)
    assert readable >= 26


@pytest.mark.parametrize("file", TRAINERS.values())
def test_command_lines_are_complete_and_name_nothing_of_a_machine(file: str) -> None:
    lines = [json.loads(line) for line in (coverage.DATA / file).read_text().splitlines()]
    assert len({line["script"] for line in lines}) == len(lines) == LINES[file]
    assert all(set(line) == {"script", "module", "args"} for line in lines)


def test_the_release_has_nothing_of_the_option_that_it_has_dropped() -> None:
    assert "grad_offload" not in (coverage.DATA / TRAINERS["verl-release"]).read_text()


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_documents_show_the_last_results(trainer: str) -> None:
    results = ROOT / "examples" / "bench" / "results" / f"coverage-{trainer}.json"
    rows = [
        coverage.Row(**{name: tuple(v) if isinstance(v, list) else v for name, v in table.items()})
        for table in json.loads(results.read_text())
    ]
    assert len(rows) == len((coverage.DATA / TRAINERS[trainer]).read_text().splitlines())
    text = (ROOT / "docs" / "supported.md").read_text()
    (shown,) = re.findall(rf"<!-- coverage-{trainer}:begin -->\n(.*?)\n<!-- coverage-{trainer}:end -->", text, re.S)
    assert shown == "\n".join(coverage.main_table(rows))


@pytest.mark.parametrize("rows", ["verl-release", "verl"])
def test_each_accepted_line_is_mapped_to_shapes_and_a_target_that_exist(rows: str) -> None:
    """Shapes that a test of the trainer, and not the kit, proves are named here."""
    known = {
        *SHAPES["verl"].split(),
        *(shape for shapes in ACTORS.values() for shape in shapes.split()),
        "sp2",
        "fully",
        "one-step",
    }
    for table in json.loads((ROOT / "examples" / "bench" / "results" / f"coverage-{rows}.json").read_text()):
        if table["judged"] and set(table["reasons"]) <= set(table["of_trainer"]):
            assert set(table["shapes"]) <= known, table["script"]
            assert not table["family"] or table["family"] in tiny_targets(), table["script"]
