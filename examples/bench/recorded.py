"""A GRPO-like run that is recorded once, step by step, so that drafts can be trained and judged along it as often as we like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from draft_training import Document, DraftConfig
from examples.bench import workload
from examples.bench.subjects import Subject

#: prompts of a trainer step, and samples of each
PROMPTS, SAMPLES = 12, 4
RATE = 2e-4  # of the policy
#: tokens through a newborn draft in the first trainer step, its head start; and through any draft in each later one
FIRST, LATER = 64 * 1024, 6 * 1024

Row = tuple[list[int], list[int]]  # token ids of a prompt, and of the response to it


@dataclass(frozen=True)
class Step:
    """What a trainer step leaves: rollouts, their documents, and the policy's tensors [V, H]."""

    documents: list[Document]
    embed: Tensor
    head: Tensor
    rows: list[Row] = field(default_factory=list)


def load(subject: Subject) -> tuple[Any, DraftConfig]:
    """The policy as it is before the run, and the shape of its draft."""
    model = AutoModelForCausalLM.from_pretrained(subject.policy(), dtype=torch.float32).eval()
    return model, DraftConfig.from_target(model.config.to_dict())


def record(
    subject: Subject,
    steps: int,
    moves: bool,
    temperature: float = 1.0,
    keep: Mapping[int, Path] | None = None,
    seed: int = 11,
    rate: float = RATE,
) -> tuple[DraftConfig, list[Step]]:
    """Rollouts of a policy, step by step.

    Args:
        subject: the policy.
        steps: how many.
        moves: the policy takes a step of AdamW after each.
        temperature: of the rollouts.
        keep: step -> folder to save the policy to that rolls out in it, with its tokenizer.
        seed: of the prompts.
        rate: of AdamW.
    """
    model, config = load(subject)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    prompts = subject.prompts(PROMPTS * steps, seed=seed)
    settings = workload.DraftSettings(temperature=temperature)
    torch.manual_seed(1)
    out = []
    for step in range(steps):
        if folder := (keep or {}).get(step):
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(subject.policy()).save_pretrained(folder)
        asked = [p for p in prompts[step * PROMPTS : (step + 1) * PROMPTS] for _ in range(SAMPLES)]
        rows = workload.sample(model, asked, settings)
        documents = [replace(d, policy_version=step) for d in workload.harvest(model, rows, config.aux_layers)]
        embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        out.append(Step(documents, embed.detach().clone(), head.detach().clone(), rows))
        if moves:
            move(model, optimizer, rows)
    return config, out


def move(model: Any, optimizer: torch.optim.Optimizer, rows: Sequence[Row]) -> None:
    """One step of policy gradient with random advantages: as far as a run moves, in a direction of no interest."""
    ids = [torch.tensor(p + r) for p, r in rows]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    attention = torch.nn.utils.rnn.pad_sequence([torch.ones_like(i) for i in ids], batch_first=True)
    logits = model(padded, attention_mask=attention).logits[:, :-1]
    chosen = logits.log_softmax(-1).gather(2, padded[:, 1:, None])[..., 0]
    mask = torch.zeros_like(chosen)
    for i, (prompt, response) in enumerate(rows):
        mask[i, len(prompt) - 1 : len(prompt) + len(response) - 1] = 1.0
    advantages = torch.randn(len(rows), 1)
    optimizer.zero_grad()
    (-(advantages * chosen * mask).sum() / mask.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
