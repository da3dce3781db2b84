"""The example of a method that comes from somebody else's package."""

from __future__ import annotations

import sys

import pytest
from builders.paths import ROOT

from spec_plugin import SpecConfig, SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.engine.lossless import check_speculative_config
from spec_plugin.lifecycle.manager import built_in_method, create_manager
from spec_plugin.lifecycle.session import SpecSession

FOLDER = ROOT / "examples" / "minimal_method"
TARGET = TargetInfo(path="/nowhere", hf_config={"vocab_size": 32}, dtype="float32", max_num_seqs=4)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "minimal_method", raising=False)


def config(**options: object) -> SpecConfig:
    return SpecConfig.parse({"method": "repeats", "plugins": ["minimal_method"], **options})


def test_a_session_drafts_with_it() -> None:
    session = SpecSession(config(k=4), TARGET)
    check_speculative_config(session.method.speculative_config())
    assert session.method.name == "repeats" and session.method.pretrained and session.method.variable_length
    assert not session.failed


def test_its_own_refusal_is_the_runs() -> None:
    with pytest.raises(SpecConfigError, match="no draft model"):
        SpecSession(config(draft="/a"), TARGET)


def test_nobody_else_knows_it() -> None:
    assert built_in_method(config(), TARGET) is None
    with pytest.raises(SpecConfigError, match="no active plugin provides it"):
        SpecSession(config(), TARGET, create_manager())


def test_it_is_short() -> None:
    assert len((FOLDER / "minimal_method.py").read_text().splitlines()) < 80
