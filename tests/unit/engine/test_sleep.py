from __future__ import annotations

import asyncio

import pytest

from spec_plugin.engine.sleep import SleepState


class Engine:
    """vLLM's: sleeps as a whole and only when all of it is awake, wakes in parts."""

    def __init__(self, awake: tuple[str, ...]) -> None:
        self.state = SleepState()
        self.state.slept()
        self.state.woke(awake)
        self.calls: list[object] = []

    async def wake_up(self, parts: list[str]) -> None:
        self.calls.append(parts)
        self.state.woke(parts)

    async def sleep(self) -> None:
        assert not self.state.asleep, "vLLM would do nothing: a part of it sleeps"
        self.calls.append("sleep")
        self.state.slept()


@pytest.mark.parametrize(
    ("awake", "needed", "calls"),
    [
        ((), ("weights",), [["weights"], ["kv_cache"], "sleep"]),
        ((), ("weights", "kv_cache"), [["weights", "kv_cache"], "sleep"]),
        (("weights",), ("weights",), []),
        (("weights",), ("weights", "kv_cache"), [["kv_cache"], "sleep", ["weights"]]),  # during a weight sync
        (("weights", "kv_cache"), ("weights", "kv_cache"), []),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_what_slept_sleeps_again_and_what_was_awake_is_awake(awake, needed, calls, fails):
    engine = Engine(awake)
    before = engine.state.asleep

    async def work() -> None:
        async with engine.state.awake(needed, engine.wake_up, engine.sleep):
            assert not engine.state.asleep & set(needed)
            if fails:
                raise RuntimeError("the work failed")

    if fails:
        with pytest.raises(RuntimeError, match="the work failed"):
            asyncio.run(work())
    else:
        asyncio.run(work())
    assert engine.calls == calls and engine.state.asleep == before
