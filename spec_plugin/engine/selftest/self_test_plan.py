"""What a self-test is asked to do, and what it gets from the engine."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spec_plugin.api.events import Schedule, SelfTestPart

MOST_AT_ONCE = 256  # requests: the sampler's memory, with the log-probs of all of them, is nobody's budget
SAMPLED_PROMPTS = 4  # few, so that many samples share a context
_QUESTIONS = ("12+34=", "What is 7 times 8?", "Name three colours.", "987+654=")


@dataclass(frozen=True, kw_only=True)
class SelfTestPlan:
    """One start-up self-test of one engine."""

    prompts: Sequence[Sequence[int]]  # token ids, a few short prompts; the first four are sampled from
    sampling: Mapping[str, Any]  # the run's own ``temperature``, ``top_p``, ``top_k``, …
    k: int  # tokens drafted per step while testing
    vocab_size: int  # of the target
    alpha: float  # chance of rejecting a correct engine
    #: in which as much is tested as fits, break-even included; where that is less than the least that proves anything, the
    #: test takes longer
    seconds: float
    limit: float  # seconds after which it ends, whatever it has shown
    max_num_seqs: int  # the engine's
    whole: bool = False  # can only 0 and k tokens be drafted
    part: SelfTestPart = SelfTestPart.ALL
    adapter: Any = None  # vLLM's LoRARequest that the run's own requests come with, if they do

    @property
    def level(self) -> float:
        """Error level of each of the three statistical tests: counts, log-probs, and counts while k is switched."""
        return self.alpha / 3

    @property
    def at_once(self) -> int:
        """Most requests in flight."""
        return min(self.max_num_seqs, MOST_AT_ONCE)

    @property
    def half_batch(self) -> list[tuple[int, Sequence[int]]]:
        """(index, prompt) of one arm's requests: as many of the sampled prompts as fill half of the engine."""
        prompts = list(enumerate(self.prompts[:SAMPLED_PROMPTS]))
        return prompts * max(1, self.at_once // (2 * len(prompts)))

    @property
    def timed(self) -> tuple[int, ...]:
        """Tokens drafted per step of which it is measured what they cost."""
        return (0, self.k) if self.whole else tuple(dict.fromkeys((0, 1, min(3, self.k), self.k)))

    def schedule(self, k: int) -> Schedule:
        """So many drafted tokens at every batch size."""
        return Schedule((k,) * (self.max_num_seqs + 1))

    def until(self, begun: float, share: float, least: float = 0.0) -> float:
        """``time.perf_counter()`` when this share of ``seconds`` since ``begun`` is over, and the least share from now on."""
        return max(begun + share * self.seconds, time.perf_counter() + least * self.seconds)


@dataclass(frozen=True)
class Sampled:
    """One generated sequence of T tokens with what the engine says of it."""

    prompt: int  # index of its prompt
    tokens: tuple[int, ...]
    logprobs: NDArray[np.float64]  # [T] log-prob of each sampled token, as the engine states it
    top: NDArray[np.float64]  # [T, n] log-probs of the n most likely tokens, descending; -inf where there are fewer
    top_ids: NDArray[np.int64]  # [T, n] these tokens, -1 where there are fewer

    def part(self, begin: int, end: int) -> Sampled:
        """Its tokens [begin, end)."""
        cut = slice(begin, end)
        return Sampled(self.prompt, self.tokens[cut], self.logprobs[cut], self.top[cut], self.top_ids[cut])


def questions_and_noise(tokenizer: Any, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Eight prompts: short questions, on which a policy is surer, in turn with random tokens, on which it is not.

    Without a tokenizer (None) all are random, of ids below ``vocab_size``.
    """
    rng = random.Random(seed)
    noise = [[rng.randrange(vocab_size) for _ in range(16)] for _ in range(8)]
    if tokenizer is None:
        return noise
    asked = [tokenizer(text)["input_ids"] for text in _QUESTIONS]
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": text}] for text in _QUESTIONS]
        asked = [tokenizer.apply_chat_template(c, add_generation_prompt=True)["input_ids"] for c in chats]
    return [prompt for pair in zip(asked, noise, strict=False) for prompt in pair]
