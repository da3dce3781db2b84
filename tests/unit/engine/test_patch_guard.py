"""A patch is applied only where its fault is present and its replacement fits; all else is a loud error."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest

from spec_plugin.api.errors import PatchError
from spec_plugin.engine.vllm.repairs import patches
from spec_plugin.engine.vllm.repairs.patches import Guard, Patch

SOURCE = '''
def double(value, scale):
    """Wrong: adds."""
    return value + scale


class Box:
    pass


box = Box()
box.func = double
'''


def patch(**changes) -> Patch:
    base = Patch(
        name="double",
        symbol="fake_library:box.func",
        reason="adds instead of multiplying",
        upstream="issue 1",
        versions="1–2",
        needed=lambda f: f(3, 5) != 15,
        replacement=lambda original: lambda value, scale: value * scale,
        guard=Guard(("value", "scale"), ("value + scale",)),
    )
    return dataclasses.replace(base, **changes)


@pytest.fixture
def library(tmp_path, monkeypatch):
    def install(source: str = SOURCE) -> types.ModuleType:
        (tmp_path / "fake_library.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        sys.modules.pop("fake_library", None)
        import fake_library

        return fake_library

    yield install
    patches.revert(patch())
    sys.modules.pop("fake_library", None)


def test_a_present_fault_is_repaired_once_and_listed(library):
    module = library()
    assert patches.apply(patch()).state == "in force"
    repaired = module.box.func
    assert repaired(3, 5) == 15
    assert patches.apply(patch()).state == "in force" and module.box.func is repaired
    assert [s.state for s in patches.statuses.values() if s.name == "double"] == ["in force"]


def test_reverting_gives_the_library_its_own_function_back(library):
    module = library()
    original = module.box.func
    patches.apply(patch())
    assert patches.skip(patch(), "asked for").state == "skipped"
    assert module.box.func is original
    assert [s.state for s in patches.statuses.values() if s.name == "double"] == ["skipped"]


def test_what_upstream_has_fixed_is_left_alone(library):
    module = library(SOURCE.replace("value + scale", "value * scale"))
    original = module.box.func
    status = patches.apply(patch())
    assert status.state == "not needed" and "fixed upstream" in status.detail
    assert module.box.func is original


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (
            SOURCE.replace("def double(value, scale)", "def double(value, scale, extra=0)"),
            "found ('value', 'scale', 'extra')",
        ),
        (SOURCE.replace("value + scale", "scale + value"), "expected ['value + scale']"),
        (SOURCE.replace("box.func = double", ""), "found none: fake_library:box.func"),
        (SOURCE.replace("return value + scale", "raise RuntimeError('new'); value + scale"), "RuntimeError: new"),
    ],
    ids=["signature", "source", "gone", "probe fails"],
)
def test_a_changed_symbol_is_refused_and_named(library, source, found):
    module = library(source)
    before = vars(module.box).copy()
    with pytest.raises(PatchError) as error:
        patches.apply(patch())
    assert "fake_library:box.func" in str(error.value) and found in str(error.value)
    assert "skip_patches" in str(error.value), "says what to do"
    assert vars(module.box) == before


def test_a_replacement_that_does_not_repair_is_refused(library):
    module = library()
    original = module.box.func
    with pytest.raises(PatchError, match="still there"):
        patches.apply(patch(replacement=lambda original: original))
    assert module.box.func is original


def test_a_function_that_moved_is_found_in_its_new_place(library):
    module = library(SOURCE.replace("box.func = double", "box.impl = double"))
    assert patches.apply(patch(moved_to=("fake_library:box.impl",))).state == "in force"
    assert module.box.impl(3, 5) == 15
