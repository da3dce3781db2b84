"""What reaches the trainer's logger is finite, whatever a plugin says."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from builders.session import session_with

from spec_plugin import hookimpl


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_not_finite_is_left_out_and_the_others_are_not(value):
    class Mine:
        @hookimpl
        def spec_metrics(self):
            return {"spec/mine": value, "spec/other": 1.0}

    metrics = session_with(Mine()).metrics()
    assert "spec/mine" not in metrics and metrics["spec/other"] == 1.0
    assert all(math.isfinite(v) for v in metrics.values())


class Counting:
    @hookimpl
    def spec_metrics(self):
        return {"spec/x": 1.0}


def with_wrapper(function: object, **kind: bool) -> tuple[object, dict[str, float]]:
    wrapper = type("Wrapping", (), {"spec_metrics": hookimpl(**kind)(function)})()
    session = session_with(Counting())
    session.manager.register(wrapper, name="wrapping")
    return session, session.metrics()


def adding(self):
    found = yield
    return [*found, {"spec/sum": sum(numbers.get("spec/x", 0.0) for numbers in found)}]


def adding_in_the_old_style(self):
    outcome = yield
    found = outcome.get_result()
    outcome.force_result([*found, {"spec/sum": sum(numbers.get("spec/x", 0.0) for numbers in found)}])


@pytest.mark.parametrize(
    ("function", "kind"), [(adding, {"wrapper": True}), (adding_in_the_old_style, {"hookwrapper": True})]
)
def test_a_wrapper_sees_all_plugins_metrics_and_may_change_them(function, kind, caplog):
    session, metrics = with_wrapper(function, **kind)
    assert metrics["spec/x"] == 1.0 and metrics["spec/sum"] == 1.0 and "spec/state" in metrics
    assert not session.failed and not caplog.records


def failing_halfway(self):
    found = yield
    for numbers in found:
        numbers["spec/x"] = math.nan
    raise ValueError("halfway")


def forgetting_to_return(self):
    yield


def with_nonsense(self):
    found = yield
    return [*found, {"spec/y": "many", "spec/z": 2.0}, 7]


@pytest.mark.parametrize(
    ("function", "warned"),
    [
        (failing_halfway, ["metrics in a wrapper"]),
        (forgetting_to_return, ["None of type NoneType is no list of mappings"]),
        (with_nonsense, ["spec/y: 'many' of type str", "7 of type int is no mapping"]),
    ],
)
def test_a_wrapper_that_fails_costs_its_own_metrics_and_no_other_plugins(function, warned, caplog):
    session, metrics = with_wrapper(function, wrapper=True)
    assert metrics["spec/x"] == 1.0 and not session.failed and metrics["spec/failed"] == 0.0
    assert metrics.get("spec/z") == (2.0 if function is with_nonsense else None)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(warned) and all(words in line for words, line in zip(warned, said, strict=True))
    session.metrics()
    assert len(caplog.records) == len(warned), "once"


def test_a_wrapper_sees_the_metrics_of_the_others_where_one_plugin_raises():
    class Broken:
        @hookimpl(tryfirst=True)
        def spec_metrics(self):
            raise ValueError("broken")

    session = session_with(Counting())
    session.manager.register(Broken(), name="broken")
    session.manager.register(type("Wrapping", (), {"spec_metrics": hookimpl(wrapper=True)(adding)})())
    metrics = session.metrics()
    assert session.failure is None and metrics["spec/x"] == metrics["spec/sum"] == 1.0


def test_wrappers_that_cannot_be_hashed_stand_around_each_other_as_pluggy_orders_them():
    @dataclass
    class Noting:
        name: str

        @hookimpl(wrapper=True, trylast=True)
        def spec_metrics(self):
            found = yield
            return [*found, {f"spec/{self.name}": float(len(found))}]

    session = session_with(Counting())
    for name in ("a", "b"):
        session.manager.register(Noting(name), name=name)
    metrics, plain = session.metrics(), session.manager.hook.spec_metrics()
    expected = {name: value for numbers in plain for name, value in numbers.items() if name in ("spec/a", "spec/b")}
    assert {name: metrics[name] for name in expected} == expected and len(expected) == 2
