"""How users of TRL roll out by themselves: an environment whose methods are tools, and a ``rollout_func`` of two turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spec_plugin_conformance import calculator
from vllm import SamplingParams


class Calculator:
    """Adds two numbers."""

    def reset(self, **row: Any) -> None:
        """Begin anew, for a row of the data: there is nothing to forget."""

    def add(self, a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The first number.
            b: The second number.

        Returns:
            Their sum.
        """
        return calculator.add(a, b)


Answers = list[tuple[list[int], list[float]]]


def two_turns(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
    """An answer to each prompt, a word of somebody else's, and another answer, as TRL asks its engine."""

    def ask(texts: Sequence[Sequence[int]]) -> Answers:
        _, answers, log_probs, _ = trainer.vllm_generation.generate(prompts=texts, images=None, num_generations=1)
        return [(ids, [at[0] for at in stated]) for ids, stated in zip(answers, log_probs, strict=True)]

    return _turns(prompts, trainer, ask)


def two_turns_by_vllm(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
    """The same by vLLM's own ``LLM.generate``."""
    params = SamplingParams(temperature=trainer.temperature, max_tokens=16, logprobs=0)

    def ask(texts: Sequence[Sequence[int]]) -> Answers:
        found = trainer.vllm_generation.llm.generate([{"prompt_token_ids": t} for t in texts], params, use_tqdm=False)
        answers = [output.outputs[0] for output in found]
        return [
            (list(a.token_ids), [at[token].logprob for at, token in zip(a.logprobs, a.token_ids, strict=True)])
            for a in answers
        ]

    return _turns(prompts, trainer, ask)


def _turns(prompts: Sequence[str], trainer: Any, ask: Callable[[list[list[int]]], Answers]) -> dict[str, Any]:
    told = trainer.processing_class(text="and?")["input_ids"]
    ids = [list(trainer.processing_class(text=prompt)["input_ids"]) for prompt in prompts]
    first = ask(ids)
    second = ask([p + answer + told for p, (answer, _) in zip(ids, first, strict=True)])
    both = list(zip(first, second, strict=True))
    return {
        "prompt_ids": ids,
        "completion_ids": [a + told + b for (a, _), (b, _) in both],
        "logprobs": [a + [0.0] * len(told) + b for (_, a), (_, b) in both],
        "env_mask": [[1] * len(a) + [0] * len(told) + [1] * len(b) for (a, _), (b, _) in both],
    }
