"""Law 3: no plugin around the guard may swallow what it has refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from batches import batch_of, stated_of
from test_training import TARGET

from spec_plugin import LogprobProvenanceError, SpecConfig, SpecConfigError, hookimpl
from spec_plugin.events import Drafts
from spec_plugin.manager import create_manager
from spec_plugin.session import SpecSession


class Swallowing:
    """A plugin that wants training to go on, whatever happens."""

    @hookimpl(wrapper=True)
    def spec_check_logprobs(self) -> Iterator[None]:
        try:
            return (yield)
        except Exception:
            return None

    @hookimpl(wrapper=True)
    def spec_check_stated(self) -> Iterator[None]:
        try:
            return (yield)
        except Exception:
            return None


@pytest.mark.parametrize("stated", [False, True])
def test_law_3_a_swallowed_refusal_stops_the_run_all_the_same(stated: bool) -> None:
    manager: Any = create_manager(load_entry_points=False)
    manager.register(Swallowing())
    session = SpecSession(SpecConfig(), TARGET, manager)
    right = torch.full((2, 4), -1.0)
    wrong = right.clone()
    wrong[1, 2] = torch.nan

    def judge(values: torch.Tensor) -> None:
        if stated:
            session.check_stated(stated_of(batch_of(0, right, values)))
        else:
            session.check_logprobs(batch_of(0, right, values, drafts=Drafts.OFF))

    judge(right)
    with pytest.raises(LogprobProvenanceError, match="not finite"):
        judge(wrong)
    judge(right)


def test_a_plugin_without_any_hook_is_refused() -> None:
    with pytest.raises(SpecConfigError, match="no function that is named after a hook"):
        create_manager((), ["json"], load_entry_points=False)
