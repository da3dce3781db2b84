"""The learning curves of the bench: the row of the perfect draft, against rollouts whose likeliest tokens are known."""

from __future__ import annotations

import torch

from draft_training import Document
from examples.bench.curves import perfect
from examples.bench.recorded import Step

TOKENS, PROMPT = 40, 5


def step_of(surprises: list[int]) -> Step:
    """A rollout whose policy expects each token that it sampled, but for those at these places."""
    ids = torch.arange(TOKENS)
    expected = ids.roll(-1)
    expected[[place - 1 for place in surprises]] = 0
    states = torch.eye(TOKENS)[expected]
    document = Document(ids, states, states, ids >= PROMPT, policy_version=0)
    return Step([document], torch.eye(TOKENS), torch.eye(TOKENS))


def test_a_perfect_draft_of_a_policy_without_surprises_has_every_token_accepted():
    curve = perfect(("adds", "still", "perfect", 0), [step_of([])])
    assert (curve.k3, curve.k8) == ([4.0], [9.0])


def test_a_perfect_draft_falls_where_the_policy_surprises_itself():
    # its first round drafts tokens 6, 7 and 8, of which the last misses; the eight rounds behind it miss none
    curve = perfect(("adds", "still", "perfect", 0), [step_of([]), step_of([8])])
    assert curve.k3 == [4.0, round((3 + 8 * 4) / 9, 2)] and curve.k8[1] < 9.0
