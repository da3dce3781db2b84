"""What is said beside each response of OpenRLHF's engine."""

from __future__ import annotations

from spec_plugin_openrlhf.turns import LAST_VERSION, VERSION, Turn, said_of

ANSWER = Turn((1, 2, 3, 4), (5, 5))
OTHER = Turn((1, 2, 9), (5, 6))


def said(first: int, last: int) -> dict[str, float]:
    return {VERSION: first, LAST_VERSION: last}


def test_a_response_says_its_own_versions():
    assert said_of([1, 2, 3, 4], [ANSWER], 7) == said(5, 5)


def test_a_conversation_goes_from_its_first_turn_to_its_last():
    assert said_of([1, 2, 3, 4, 8, 8, 10], [ANSWER, Turn((1, 2, 3, 4, 8, 8, 10), (6, 7))], 7) == said(5, 7)


def test_what_did_not_become_part_of_the_response_says_nothing_of_it():
    """An agent may ask more than once, and keep one answer."""
    assert said_of([1, 2, 9], [ANSWER, OTHER], 7) == said(5, 6)


def test_a_response_that_no_engine_sampled_is_of_the_version_of_now():
    assert said_of([7, 7], [ANSWER], 7) == said(7, 7)
