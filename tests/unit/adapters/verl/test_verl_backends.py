"""The adapter's rooms for verl's backends, and the mix-in that they make of whatever engine verl has registered."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not (find_spec("verl") and find_spec("vllm")), reason="needs verl and vLLM")

SCRIPT = """
    import json, os

    os.environ.update(VERL_USE_EXTERNAL_MODULES="spec_plugin_verl_cpu", VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda")
    import verl  # noqa: F401
    from verl.workers.engine import EngineRegistry

    stock = {name: dict(engines) for name, engines in EngineRegistry._engines["language_model"].items()}

    class Own(stock["fsdp"]["cuda"]):
        pass

    EngineRegistry._engines["language_model"]["fsdp"]["cuda"] = Own
    import spec_plugin_verl
    from spec_plugin_verl.actor import SpecActor
    from spec_plugin_verl.backends import BACKENDS, mixed
    from spec_plugin_verl.registration import register
    from spec_plugin_verl_check.options import ACTORS

    taken = EngineRegistry._engines["language_model"]
    once = {name: dict(engines) for name, engines in taken.items()}
    register()
    engine = taken["fsdp2"]["cuda"]
    order = [c.__name__ for c in engine.__mro__]
    found = {
        "rooms": sorted(BACKENDS),
        "actors": sorted(ACTORS),
        "of another's class": issubclass(taken["fsdp"]["cuda"], Own) and issubclass(taken["fsdp"]["cuda"], SpecActor),
        "twice": taken == once and mixed("fsdp2", engine) is engine,
        "before verl's": order.index("SpecActor") < order.index("FSDPEngineWithLMHead"),
        "others": [name for name in taken if name not in BACKENDS and taken[name] != stock[name]],
        "values": any(
            issubclass(c, SpecActor) for part in EngineRegistry._engines["value_model"].values() for c in part.values()
        ),
        "module": engine.__module__,
    }
    print("FOUND", json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(found_by) -> dict[str, Any]:
    return found_by(SCRIPT)


def test_each_backend_that_the_check_takes_has_a_room_and_no_other(found):
    assert found["rooms"] == found["actors"]


def test_the_flag_comes_before_whatever_class_was_registered_once(found):
    assert found["of another's class"] and found["before verl's"] and found["twice"]
    assert found["module"] == "spec_plugin_verl.backends.fsdp"


def test_critics_and_backends_without_a_room_stay_as_they_are(found):
    assert not found["others"] and not found["values"]
