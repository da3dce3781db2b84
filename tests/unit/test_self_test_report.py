"""What follows from a self-test: a fault stops the run, want of time only costs speculation."""

from spec_plugin.engine.verdicts import counts_check
from spec_plugin.events import Check, SelfTestReport

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
