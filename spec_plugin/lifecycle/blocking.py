"""Coroutines from synchronous functions."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine from a synchronous function, also under a running event loop (in a thread of its own then)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    on_stream = callers_stream()

    def run() -> T:
        with on_stream():
            return asyncio.run(work)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def callers_stream() -> Callable[[], AbstractContextManager[None]]:
    """For a thread that goes on with the caller's work on a card: the caller's device and stream, around what it does.

    A thread begins on the first device and its default stream, and nothing orders its kernels and the caller's.
    """
    torch: Any = sys.modules.get("torch")
    card = None
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        card = torch.cuda.current_device(), torch.cuda.current_stream()

    @contextmanager
    def on_stream() -> Iterator[None]:
        if card is None:
            yield
        else:
            with torch.cuda.device(card[0]), torch.cuda.stream(card[1]):
                yield

    return on_stream
