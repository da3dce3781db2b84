"""The table of the controller's states, as a table."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from spec_plugin.builtin.break_even.states import NEXT, REST, Sign, States
from spec_plugin.speculation import Reason, Speculation

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
@pytest.mark.parametrize(("slower", "dropped", "then"), [(False, False, None), (True, False, R), (False, True, R)])
def test_behind_one(state, slower, dropped, then):
    states = at(state)
    states.rolled_out(True, slower, dropped)
    assert states.now is (then or state)


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
        states.rolled_out(False, False, False)
    raise AssertionError("for ever")


def convicted(states: States, times: int) -> Sequence[int]:
    found = []
    for _ in range(times):
        states.rolled_out(True, True, False)
        found.append(rested(states, pays=True))
    return found


def test_law_7_drafts_that_lose_again_and_again_rest_longer_up_to_a_bound():
    assert convicted(at(S), 4) == [2, 4, REST, REST]
    states = at(S)
    convicted(states, 3)
    states.proven()
    assert convicted(states, 1) == [2]


def test_while_it_rests_because_it_was_slower_what_is_predicted_says_nothing_unless_it_has_risen():
    states = at(S)
    states.rolled_out(True, True, False)
    assert states.before(True, False, WHY) is R and states.why is Reason.PAIRS_SLOWER
    states.release()
    assert states.before(True, False, WHY) is S


def test_what_does_not_pay_is_tried_again_after_a_rest_and_a_rollout_with_drafts_begins_it_anew():
    states = at(S)
    states.rolled_out(True, False, False)
    assert rested(states, pays=False) == REST and states.now is T
    states.rolled_out(True, False, False)
    assert rested(states, pays=False) == REST


def test_a_try_that_was_chosen_is_not_taken_back_when_asked_once_more_before_the_rollout():
    states = at(R)
    assert states.before(False, True, WHY) is T and states.before(False, True, WHY) is T
    states.rolled_out(True, False, False)
    assert states.before(False, False, WHY) is R


def test_what_was_released_is_due():
    states = at(S)
    for _ in range(2):
        states.rolled_out(True, True, False)
    states.release()
    assert states.due and not states.held
