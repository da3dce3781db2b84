"""The table of the controller's states, as a table."""

from __future__ import annotations

import pytest

from spec_plugin.api.speculation import Reason, Speculation
from spec_plugin.policy.break_even.states import NEXT, REST, Sign, States

U, T, S, R = Speculation.UNTRIED, Speculation.TRYING, Speculation.SERVING, Speculation.RESTING
WHY = Reason.BELOW_BREAK_EVEN


def at(state: Speculation) -> States:
    states = States()
    states.now = state
    return states


@pytest.mark.parametrize(
    ("state", "pays", "due", "then"),
    [
        (U, False, False, U),
        (U, True, False, T),
        (U, False, True, T),
        (T, True, False, S),
        (T, False, False, R),
        (T, False, True, R),
        (S, True, False, S),
        (S, False, False, R),
        (S, False, True, R),
        (R, True, False, S),
        (R, False, True, T),
        (R, False, False, R),
    ],
)
def test_before_a_rollout(state, pays, due, then):
    assert at(state).before(pays, due, WHY) is then


@pytest.mark.parametrize("state", [T, S])
@pytest.mark.parametrize("dropped", [True, False])
def test_behind_one(state, dropped):
    states = at(state)
    states.rolled_out(True, dropped)
    assert states.now is (R if dropped else state)


def test_no_state_is_without_a_way_out_and_every_way_leads_to_serving():
    states = {U, T, S, R}
    assert {state for state, _ in NEXT} == states == {U} | set(NEXT.values())
    reaches = {S}
    for _ in states:
        reaches |= {state for (state, _), then in NEXT.items() if then in reaches}
    assert reaches == states
    assert {sign for _, sign in NEXT} == set(Sign)


def rested(states: States, pays: bool) -> int:
    """Rollouts that it rests, of a draft that is predicted to pay, or not."""
    for phase in range(50):
        if states.before(pays, states.due, WHY) is not R:
            return phase
        states.rolled_out(False, False)
    raise AssertionError("for ever")


def test_what_does_not_pay_is_tried_again_after_a_rest_and_a_rollout_with_drafts_begins_it_anew():
    states = at(S)
    states.rolled_out(True, False)
    assert rested(states, pays=False) == REST and states.now is T
    states.rolled_out(True, False)
    assert rested(states, pays=False) == REST


def test_a_try_that_was_chosen_is_not_taken_back_when_asked_once_more_before_the_rollout():
    states = at(R)
    assert states.before(False, True, WHY) is T and states.before(False, True, WHY) is T
    states.rolled_out(True, False)
    assert states.before(False, False, WHY) is R
