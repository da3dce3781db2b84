"""How a draft can start before a run: on the policy's own rollouts of the task, or on text that is not of the task."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoTokenizer

from draft_training import Document, DraftConfig, DraftTrainer, HiddenBuffer, TrainSettings
from examples.bench import recorded, workload
from examples.bench.common import say, track
from examples.bench.recorded import Row
from examples.bench.subjects import COUNT, LETTERS, Subject, sorted_by_hand
from examples.quickstart.policy import question, worked_answer

#: text that is not of the task: the policy's own answers to plain strings of the task's alphabet; or questions and answers of
#: the other task, which the policy only reads
Other = Literal["strings", "task"]
ALPHABETS = {"add": "0123456789+=", "sort": LETTERS}
LONGEST = 13  # characters of a plain string
#: tokens of an optimizer step, as the plugin takes on a CPU
TOKENS = 512
#: share of the steps at the end in which the rates fall to zero, as in ``spec-plugin train``
COOLING = 0.2


@dataclass(frozen=True)
class Started:
    """A draft that was trained before the run, on the policy of step 0."""

    tensors: dict[str, Tensor]
    text_tokens: int  # harvested, of questions and answers
    steps: int  # optimizer steps


def start(
    subject: Subject, text: Literal["own"] | Other, temperature: float, rollouts: int, steps: int, k: int
) -> Started:
    """Train a draft for the policy as it is before the run.

    All k tokens are unrolled in each step, whatever the text.

    Args:
        subject: the policy.
        text: what to train on; ``own`` is the policy's own answers to questions of its task, others than the run's.
        temperature: of the answers.
        rollouts: how many.
        steps: optimizer steps.
        k: tokens drafted.
    """
    model, config = recorded.load(subject)
    torch.manual_seed(2)
    rows = texts(model, subject, text, temperature, rollouts)
    documents = workload.harvest(model, rows, config.aux_layers)
    say(f"{subject.name}: a draft from {text}, e.g. {_shown(subject, rows[0])}")
    tensors = _trained(model, config, documents, steps, k, f"training on {text}")
    return Started(tensors, sum(map(len, documents)), steps)


def texts(
    model: Any, subject: Subject, text: Literal["own"] | Other, temperature: float, count: int, seed: int = 12
) -> list[Row]:
    """Questions with answers, to be harvested in a forward pass of the policy."""
    if text == "task":
        return other_task(subject, count, seed)
    prompts = subject.prompts(count, seed) if text == "own" else plain_strings(subject, count, seed)
    return workload.sample(model, prompts, workload.DraftSettings(temperature=temperature))


def plain_strings(subject: Subject, count: int, seed: int) -> workload.Prompts:
    """Chats that say something of the task's alphabet, and hardly ever ask for what the policy was taught."""
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(subject.policy())
    said = ("".join(rng.choices(ALPHABETS[subject.task], k=rng.randint(3, LONGEST))) for _ in range(count))
    return [_asked(tokenizer, [{"role": "user", "content": text}]) for text in said]


def other_task(subject: Subject, count: int, seed: int) -> list[Row]:
    """Questions and answers of the task that the policy was not taught, with the same slips."""
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(subject.policy())
    rows = []
    for _ in range(count):
        if subject.task == "sort":
            low = 10 ** rng.choice((2, 3, 4))
            a, b = rng.randrange(low, 10 * low), rng.randrange(low, 10 * low)
            chat, answer = question(a, b), worked_answer(a, b, rng, subject.slip)
        else:
            letters = "".join(rng.sample(LETTERS, COUNT))
            chat, answer = [{"role": "user", "content": letters}], sorted_by_hand(letters, rng, subject.slip)
        rows.append((_asked(tokenizer, chat), [*tokenizer(answer).input_ids, tokenizer.eos_token_id]))
    return rows


def _asked(tokenizer: Any, chat: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text).input_ids
    return ids


def _shown(subject: Subject, row: Row) -> str:
    tokenizer = AutoTokenizer.from_pretrained(subject.policy())
    return " -> ".join(repr(tokenizer.decode(ids)) for ids in row)


def _trained(
    model: Any, config: DraftConfig, documents: Sequence[Document], steps: int, k: int, label: str
) -> dict[str, Tensor]:
    settings = TrainSettings(ttt_steps=k, first_steps=k, tokens_per_step=TOKENS)
    trainer = DraftTrainer(config, settings, device="cpu", seed=0)
    trainer.update_policy(model.get_input_embeddings().weight, model.get_output_embeddings().weight, 0)
    buffer = HiddenBuffer(1 << 30, 1 << 40, seed=0)
    for document in documents:
        buffer.add(document)
    for step in track(range(steps), label):
        trainer.schedule.scale = min(1.0, (steps - step) / max(1.0, COOLING * steps))
        trainer.train_slice(buffer, math.inf, 1)
    return trainer.engine_tensors()
