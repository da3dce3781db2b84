"""Policies of several widths on two tasks, and their rollouts: what learning curves of a draft are measured on."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.bench.common import CACHE, say
from examples.bench.workload import Prompts
from examples.quickstart.policy import (
    IGNORED,
    PolicySettings,
    build_tokenizer,
    cached_policy,
    made_whole,
    question,
    taught,
)

Task = Literal["add", "sort"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
COUNT = 7  # letters to sort: answers of 42 tokens


@dataclass(frozen=True)
class Subject:
    """A policy: what it was taught, and how wide it is."""

    task: Task
    width: int  # hidden size, a multiple of 32
    steps: int = 320  # optimizer steps of teaching
    slip: float = 0.15  # chance of a mistake in each line of the last examples
    layers: int = 8
    seed: int = 0
    vocabulary: int = 320  # of which the task uses a hundred

    @property
    def name(self) -> str:
        """Short, for tables."""
        return f"{self.task}-{self.width}" + f"-v{self.vocabulary}" * (self.vocabulary != Subject.vocabulary)

    def policy(self) -> Path:
        """Its folder, with a tokenizer; taught on the first call."""
        CACHE.mkdir(parents=True, exist_ok=True)
        settings = PolicySettings(
            hidden_size=self.width,
            steps=self.steps,
            slip=self.slip,
            layers=self.layers,
            seed=self.seed,
            vocab_size=self.vocabulary,
        )
        if self.task == "add":
            return cached_policy(CACHE, settings)
        text = json.dumps(asdict(self)) + Path(__file__).read_text()
        out = CACHE / f"sorts-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        if not out.exists():
            say(f"teaching {self.name}")
            _teach_sorting(out, self, settings)
        return out

    def prompts(self, count: int, seed: int) -> Prompts:
        """Token ids of that many questions."""
        tokenizer, rng = AutoTokenizer.from_pretrained(self.policy()), random.Random(seed)
        made = []
        for _ in range(count):
            if self.task == "add":
                digits = rng.choice((3, 4, 5))
                low = 10 ** (digits - 1)
                chat = question(rng.randrange(low, 10 * low), rng.randrange(low, 10 * low))
            else:
                chat = [{"role": "user", "content": "".join(rng.sample(LETTERS, COUNT))}]
            made.append(_asked(tokenizer, chat))
        return made


def sorted_by_hand(letters: str, rng: random.Random, slip: float) -> str:
    """Selection sort, a line a letter: the smallest one, and what is left in its old order; a slip takes the next one."""
    lines, left = [], letters
    while left:
        ranked = sorted(left)
        chosen = ranked[1] if len(ranked) > 1 and rng.random() < slip else ranked[0]
        left = left.replace(chosen, "")
        lines.append(f"{chosen}{left}\n")
    return "".join(lines)


def _asked(tokenizer: Any, chat: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text).input_ids
    return ids


def _sorting_batches(
    subject: Subject, settings: PolicySettings, tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rng = random.Random(subject.seed)
    for step in range(settings.steps):
        slip = settings.slip if step >= settings.careful_share * settings.steps else 0.0
        ids, labels = [], []
        for _ in range(settings.batch_size):
            letters = "".join(rng.sample(LETTERS, COUNT))
            asked = _asked(tokenizer, [{"role": "user", "content": letters}])
            answer = [*tokenizer(sorted_by_hand(letters, rng, slip)).input_ids, tokenizer.eos_token_id]
            ids.append(asked + answer)
            labels.append([IGNORED] * len(asked) + answer)
        yield torch.tensor(ids), torch.tensor(labels)


def _teach_sorting(out: Path, subject: Subject, settings: PolicySettings) -> None:
    tokenizer = build_tokenizer(settings.vocab_size)
    config = LlamaConfig(
        vocab_size=settings.vocab_size,
        hidden_size=subject.width,
        intermediate_size=2 * subject.width,
        num_hidden_layers=subject.layers,
        num_attention_heads=subject.width // 32,
        num_key_value_heads=subject.width // 32,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(subject.seed)
    model = LlamaForCausalLM(config)
    taught(model, _sorting_batches(subject, settings, tokenizer), settings)
    with made_whole(out) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
