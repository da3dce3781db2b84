"""Work on an engine that its trainer has put to sleep, in whole or in part, and that must be found so again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

#: what vLLM's sleep mode frees, in the order in which it comes back
PARTS = ("weights", "kv_cache")


class SleepState:
    """Tracks which parts are asleep; vLLM itself only says whether any is."""

    def __init__(self) -> None:
        self.asleep: frozenset[str] = frozenset()

    def slept(self) -> None:
        """Note that vLLM has put every part to sleep."""
        self.asleep = frozenset(PARTS)

    def woke(self, parts: Iterable[str] | None) -> None:
        """Note that these parts are awake again; None: all."""
        self.asleep -= frozenset(PARTS if parts is None else parts)

    @asynccontextmanager
    async def awake(
        self,
        parts: Iterable[str],
        wake_up: Callable[[list[str]], Awaitable[object]],
        sleep: Callable[[], Awaitable[object]],
    ) -> AsyncIterator[None]:
        """Wake these parts for the block; afterwards the engine is as it was before.

        vLLM can only put all of them to sleep, and does nothing where one is asleep already (0.29 ``Executor.sleep``): the
        weights would stay in the memory that the trainer needs. So all of it is woken first, and what was awake again last.

        Args:
            parts: of ``PARTS``.
            wake_up: the engine's, for some parts; it calls ``woke``.
            sleep: the engine's, level 1 (the weights keep their values); it calls ``slept``.
        """
        before = self.asleep
        missing = [part for part in PARTS if part in before and part in set(parts)]
        if missing:
            await wake_up(missing)
        try:
            yield
        finally:
            if missing:
                if rest := [part for part in PARTS if part in self.asleep]:
                    await wake_up(rest)
                await sleep()
                if again := [part for part in PARTS if part not in before]:
                    await wake_up(again)
