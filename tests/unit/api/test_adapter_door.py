"""The door, and that of draft training: what they name is there, each name once, and nobody loads what he does not ask for."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest
from builders.paths import ROOT

import draft_training
import spec_plugin.adapter as door


@pytest.mark.parametrize("module", [door, draft_training])
def test_what_type_checkers_see_is_what_is_handed_out(module: ModuleType):
    tree = ast.parse(Path(module.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)]
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert module.__all__ == sorted(seen)
    assert list(seen.items()) == sorted(seen.items(), key=lambda item: (item[1], item[0]))


def test_every_name_is_where_the_door_says(found_by):
    found = found_by(
        """
        import json
        import draft_training
        import spec_plugin.adapter as door
        missing = [name for module in (door, draft_training) for name in module.__all__ if getattr(module, name, None) is None]
        print("FOUND " + json.dumps({"missing": missing, "many": len(door.__all__)}))
        """
    )
    assert found["missing"] == [] and found["many"] > 50


def test_a_name_that_is_not_there_is_told_as_python_does():
    assert not hasattr(door, "nothing_of_the_kind") and not hasattr(draft_training, "nothing_of_the_kind")
    assert dir(door) == door.__all__


def test_options_load_neither_torch_nor_vllm(found_by):
    found = found_by(
        """
        import json, sys
        before = set(sys.modules)
        from spec_plugin.adapter import Objection, SpecConfig, TargetInfo
        loaded = set(sys.modules) - before
        heavy = [name for name in ("torch", "vllm", "spec_plugin.trainer.spec_run", "spec_plugin.engine.front") if name in loaded]
        print("FOUND " + json.dumps({"heavy": heavy}))
        """
    )
    assert found["heavy"] == []


def test_the_minimal_adapter_imports_the_door_and_nothing_else_of_ours_and_is_short():
    """An import contract says so of the others; its driver belongs to the kit, ``cpu`` to vLLM's CPU build."""
    folder = ROOT / "examples" / "minimal_adapter" / "minimal_adapter"
    for file in set(folder.glob("*.py")) - {folder / "driver.py", folder / "cpu.py"}:
        nodes = [
            node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        named = {
            f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            for node in nodes
            for alias in node.names
        }
        ours = {name for name in named if name.startswith(("spec_plugin", "draft_training"))}
        assert all(name.startswith("spec_plugin.adapter") for name in ours), (file.name, ours)
    assert len((folder / "adapter.py").read_text().splitlines()) <= 120
