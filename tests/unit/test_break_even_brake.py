"""The brake does not believe the cost model; and each time that it was right, it holds for longer."""

from __future__ import annotations

from spec_plugin.builtin.break_even.controller import Brake


def held(brake: Brake) -> int:
    """Pull it: drafts are slower than plain decoding twice, and a plain phase confirms it; then phases until it lets go."""
    while not brake.on:
        brake.rolled_out(80.0, drafted=True)
    assert brake.rolled_out(100.0, drafted=False), "the plain phase decides"
    phases = 0
    while brake.on:
        brake.rolled_out(100.0, drafted=False)
        phases += 1
    return phases


def test_law_7_drafts_that_lose_again_and_again_are_tried_less_and_less():
    brake = Brake()
    brake.rolled_out(100.0, drafted=False)
    assert [held(brake) for _ in range(3)] == [8, 16, 32]


def test_a_plain_phase_that_is_no_faster_acquits_the_drafts():
    brake = Brake()
    brake.rolled_out(100.0, drafted=False)
    for _ in range(2):
        brake.rolled_out(80.0, drafted=True)
    assert brake.on and not brake.rolled_out(80.0, drafted=False) and not brake.on
