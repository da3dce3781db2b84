"""Files that others wrote are read in two places, which know pipes, devices, torn files and those that unpack to all of memory.

``spec_plugin/plan/text_files.py`` reads texts, ``draft_training/files.py`` what is in a checkpoint. Whoever opens a file
elsewhere says here whose it is.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from builders.paths import ROOT

from spec_plugin.plan.sources import parsed

PACKAGES = ("spec_plugin", "draft_training", "adapters", "projection")
READERS = {"spec_plugin/plan/text_files.py", "draft_training/files.py"}
#: function -> whose file it opens
OWN = {
    "spec_plugin/policy/exactness/plugin.py: spec_load": "of this run's own checkpoint; what cannot be read is draft trouble",
    "spec_plugin/policy/provenance/guard.py: spec_load": "of this run's own checkpoint; what cannot be read is draft trouble",
    "spec_plugin/commands/report/page.py: to_html": "of this package",
    "spec_plugin/commands/report/read.py: _records": "of tensorboard's events, record by record; the file was looked at before",
    "spec_plugin/commands/train/run.py: _in_engine": "of the command's own folder",
    "spec_plugin/commands/train/run.py: _finish": "of the command's own folder",
    "spec_plugin/engine/vllm/offline.py: sample": "written by its own parent process",
    "spec_plugin/engine/vllm/offline.py: lines_of": "written by itself",
    "spec_plugin/engine/vllm/offline.py: main": "written by its own parent process",
    "spec_plugin/plan/sources.py: source_of": "of an installed library",
    "draft_training/parsing.py: lazily": "of this package",
    "adapters/spec_plugin_openrlhf/checkpoints.py: latest": "written by the trainer's own process",
}


def opening(tree: ast.AST, function: str = "") -> Iterator[str]:
    """Names of functions in which a file is opened for its content."""
    for node in ast.iter_child_nodes(tree):
        here = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        if isinstance(node, ast.Call):
            called = node.func
            name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
            mode = node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
            builtin = isinstance(called, ast.Name) and name == "open"
            if name in ("read_text", "read_bytes", "safe_load_file") or builtin or (name == "open" and mode):
                yield here
        yield from opening(node, here)


def test_who_reads_a_file_that_others_wrote_does_it_by_one_of_two_readers() -> None:
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py") if "build" not in file.parts]
    found = {
        f"{name}: {function}"
        for file in files
        if (name := file.relative_to(ROOT).as_posix()) not in READERS
        for function in opening(parsed(file.read_text()))
    }
    assert found == set(OWN), (
        "read it by spec_plugin.plan.text_files.text_of or draft_training.files, or say here whose it is"
    )


def test_the_rule_sees_what_it_is_for() -> None:
    for line in ("open(p)", "p.read_text()", "p.read_bytes()", 'p.open("rb")', "json.loads(Path(p).read_text())"):
        assert [*opening(ast.parse(f"def f(p):\n    {line}"))] == ["f"], line
    assert not [*opening(ast.parse("def f(run):\n    run.harvest.open()\n    run.open(tokens)"))]
