"""What follows from a self-test: a fault stops the run, want of time only costs speculation."""

from spec_plugin.api.events import Check, SelfTestReport, StepTiming
from spec_plugin.engine.selftest.verdicts import counts_check

FINE = Check("greedy", True, "8/8")
LATE = Check("samples", False, "not finished", out_of_time=True)
WRONG = Check("finite", False, "3 of 9 not finite")


def test_want_of_time_is_told_from_a_fault():
    assert SelfTestReport((FINE, LATE), 1.0).out_of_time
    assert not SelfTestReport((FINE,), 1.0).out_of_time
    assert not SelfTestReport((LATE, WRONG), 1.0).out_of_time
    assert not SelfTestReport((FINE, LATE), 1.0).passed


def test_too_few_samples_prove_nothing_and_are_no_fault():
    check = counts_check([], [], 1e-6)
    assert not check.passed and check.out_of_time


def test_break_even_is_the_cost_of_the_largest_k_against_a_paused_draft():
    plain = [StepTiming(b, 0, True, 2.0, 100) for b in (1, 8)]
    drafting = [StepTiming(8, 3, False, 3.0, 50), StepTiming(1, 3, False, 2.5, 50), StepTiming(1, 1, False, 2.2, 50)]
    rare = [StepTiming(7, 3, False, 9.0, 2), StepTiming(7, 0, True, 2.0, 2), StepTiming(8, 0, False, 2.1, 50)]
    assert SelfTestReport((), 1.0, (*drafting, *plain, *rare)).break_even == {1: 1.25, 8: 1.5}
    assert SelfTestReport((), 1.0, tuple(plain)).break_even == SelfTestReport((), 1.0).break_even == {}
