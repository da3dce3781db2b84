"""A few of many attempts at random; all of them by ``python -m builders.fuzz 3000``."""

from __future__ import annotations

from builders.fuzz import attack


def test_whatever_is_typed_or_given_is_answered_in_time_and_a_damaged_draft_is_never_taken() -> None:
    outcomes, _ = attack(60)
    kinds = {outcome.split()[0] for outcome in outcomes}
    assert kinds == {"option", "draft", "command"} and outcomes["draft taken"] and outcomes["draft refused"], outcomes
