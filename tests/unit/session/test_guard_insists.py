"""Law 3: no plugin around the guard may swallow what it has refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from builders.batches import batch_of, stated_of
from builders.training import TARGET

from spec_plugin import LogprobProvenanceError, SpecConfig, SpecConfigError, hookimpl
from spec_plugin.api.events import Drafts
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession


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


class TheirGuard:
    """A third party's, under a name of its own and in the place of ours."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    @hookimpl
    def spec_check_logprobs(self) -> None:
        raise self.error

    @hookimpl
    def spec_check_stated(self) -> None:
        raise self.error


class SwallowingInTheOldStyle:
    @hookimpl(hookwrapper=True)
    def spec_check_logprobs(self) -> Iterator[None]:
        (yield).force_result([])  # type: ignore[attr-defined]

    @hookimpl(hookwrapper=True)
    def spec_check_stated(self) -> Iterator[None]:
        (yield).force_result([])  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [LogprobProvenanceError("theirs"), RuntimeError("theirs")], ids=["refusal", "bug"])
@pytest.mark.parametrize("wrapper", [Swallowing, SwallowingInTheOldStyle])
@pytest.mark.parametrize("stated", [False, True])
def test_law_3_any_guards_refusal_stops_the_run_whoever_swallows_it(
    error: Exception, wrapper: type, stated: bool
) -> None:
    manager: Any = create_manager(block=["provenance"], load_entry_points=False)
    manager.register(wrapper())
    manager.register(TheirGuard(error), name="theirs")
    session, values = SpecSession(SpecConfig(), TARGET, manager), torch.full((2, 4), -1.0)
    batch = batch_of(0, values, values, drafts=Drafts.OFF)
    with pytest.raises(type(error), match="theirs"):
        session.check_stated(stated_of(batch)) if stated else session.check_logprobs(batch)
    manager.unregister(name="theirs")
    session.check_stated(stated_of(batch))
    session.check_logprobs(batch)
