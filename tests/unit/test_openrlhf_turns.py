"""What is said beside each response of OpenRLHF's engine."""

from __future__ import annotations

from spec_plugin_openrlhf.turns import LAST_VERSION, VERSION, Turn, said_of

from spec_plugin.engine.control import PLAIN_FROM, PLAIN_UNTIL

ANSWER = Turn((1, 2, 3, 4), {PLAIN_FROM: 2, PLAIN_UNTIL: 4}, (5, 5))
OTHER = Turn((1, 2, 9), {}, (5, 6))


def said(versions: tuple[int, int], plain: tuple[int, int] = (-1, -1)) -> dict[str, float]:
    return {PLAIN_FROM: plain[0], PLAIN_UNTIL: plain[1], VERSION: versions[0], LAST_VERSION: versions[1]}


def test_a_response_says_its_own_versions_and_its_own_plain_stretch():
    assert said_of([1, 2, 3, 4], [ANSWER], 7) == said((5, 5), (2, 4))


def test_a_conversation_goes_from_its_first_turn_to_its_last():
    later = Turn((1, 2, 3, 4, 8, 8, 10), {}, (6, 7))
    found = said_of([1, 2, 3, 4, 8, 8, 10], [ANSWER, later], 7)
    assert (found[VERSION], found[LAST_VERSION]) == (5, 7)


def test_what_did_not_become_part_of_the_response_says_nothing_of_it():
    """An agent may ask more than once, and keep one answer."""
    assert said_of([1, 2, 9], [ANSWER, OTHER], 7) == said((5, 6))


def test_a_response_that_no_engine_sampled_is_of_the_version_of_now():
    assert said_of([7, 7], [ANSWER], 7) == said((7, 7))
