"""What an adapter says to have cut is recorded as it says it to ``SpecRun``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from spec_plugin_conformance import named

from spec_plugin.trainer.log_probs import Responses
from spec_plugin.trainer.spec_run import SpecRun


class Session:
    pass


def test_rows_that_are_named_are_noted_and_the_check_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checked: list[Any] = []
    for name in ("check", "check_stated"):
        monkeypatch.setattr(SpecRun, name, lambda self, responses, *more: checked.append(more))
    session, noted = Session(), []
    for _ in range(2):  # a process may have a second recorder of the same session
        named.watch_named(session, lambda hook, **what: noted.append((hook, what["rows"])))  # type: ignore[arg-type]
    documents = [torch.arange(4)] * 2
    mask = torch.tensor([[True, True], [True, False]])
    stated = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])
    run: Any = SimpleNamespace(session=session)
    for cut in (None, torch.tensor([False, False]), torch.tensor([False, True])):
        SpecRun.check(run, Responses(documents, [2, 2], mask, stated, cut=cut), stated)
    assert noted == [("rows_cut", [[-3.0]])] and len(checked) == 3
    other: Any = SimpleNamespace(session=Session())
    SpecRun.check(other, Responses(documents, [2, 2], mask, stated, cut=torch.tensor([True, True])), stated)
    assert len(noted) == 1
