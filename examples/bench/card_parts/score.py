"""Log-probs of given text by transformers' own forward pass, as an actor recomputes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

Row = tuple[list[int], list[int]]  # prompt, response

ROWS = 16_384  # padded tokens of one forward pass
LOGITS = 2_048  # positions whose logits exist at one time


class Scorer:
    """A policy in transformers."""

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        """Load it.

        Args:
            folder: of the policy.
            dtype: of its forward pass, the engine's.
            device: "cuda" or "cpu".
        """
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.model = model.to(device).eval()

    @torch.no_grad()
    def score(self, rows: Sequence[Row], temperature: float) -> list[list[float]]:
        """The log-prob of every response token, at a temperature above 0."""
        found: list[list[float]] = [[] for _ in rows]
        for part in portions(rows):
            for place, values in zip(part, self._forward([rows[i] for i in part], temperature), strict=True):
                found[place] = values
        return found

    def _forward(self, rows: Sequence[Row], temperature: float) -> list[list[float]]:
        device = self.model.device
        ids = [torch.tensor(prompt + response) for prompt, response in rows]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(i) for i in ids], batch_first=True).to(device)
        hidden = self.model.model(input_ids=padded, attention_mask=mask, use_cache=False).last_hidden_state
        # the state before a token says what its probability was
        states = torch.cat([hidden[i, len(p) - 1 : len(p) + len(r) - 1] for i, (p, r) in enumerate(rows)])
        tokens = torch.tensor([token for _, response in rows for token in response], device=device)
        values = torch.cat([self._gathered(s, t, temperature) for s, t in zip(*_split(states, tokens), strict=True)])
        return [part.tolist() for part in values.cpu().split([len(r) for _, r in rows])]

    def _gathered(self, states: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        logits = self.model.lm_head(states).float() / temperature
        return torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0]


def portions(rows: Sequence[Row]) -> Iterator[list[int]]:
    """Indices of the rows, shortest first, in parts of at most ``ROWS`` padded tokens (or one row)."""
    order = sorted(range(len(rows)), key=lambda i: sum(map(len, rows[i])))
    part: list[int] = []
    for i in order:
        if part and (len(part) + 1) * sum(map(len, rows[i])) > ROWS:
            yield part
            part = []
        part.append(i)
    if part:
        yield part


def _split(states: Tensor, tokens: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return states.split(LOGITS), tokens.split(LOGITS)
