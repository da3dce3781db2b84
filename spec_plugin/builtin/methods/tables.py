"""vLLM's table of k by batch size, as an engine is started with it."""

from __future__ import annotations


def every_k(largest: int, k: int) -> list[tuple[int, int, int]]:
    """vLLM's (from, to, k) for batch sizes, naming each k once: its V2 model runner captures graphs for these only.

    What it says holds until the first schedule is set, which is before the first rollout.
    """
    smaller = min(k, largest - 1)  # so many batch sizes get one of their own, down to k = 0 for the largest
    single = [(largest - i, largest - i, i) for i in range(smaller)]
    return [(1, largest - smaller, k), *reversed(single)]
