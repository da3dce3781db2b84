"""Replaying greedy and sampled proposals on recorded text, against rejection sampling with known distributions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draft_training.batch import Document, PackedBatch, pack
from draft_training.loss import replay
from draft_training.proposals import DRAFT_TEMPERATURES, ProposalStats, Sampled, expected_replay, replay_proposals

V, STEPS = 12, 3


class MarkovDraft:
    """Each token by the one before it: logits [V, Vd] of its own, for the tokens ``ids`` or all."""

    def __init__(self, logits: Tensor, ids: Tensor | None = None) -> None:
        self.logits, self.ids, self.looked_at = logits, ids, 0

    def states(self, batch: PackedBatch, embed: Tensor, steps: int):
        for row in batch.next_rows(steps):
            self.looked_at += 1
            yield torch.nn.functional.one_hot(batch.input_ids[row], V).float()

    def head(self, lm_head: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.logits.T.contiguous(), self.ids


def _world(sharpness: float, noise: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits [V, V] of a policy and of a draft that has learnt it but for some noise, by the token before."""
    g = torch.Generator().manual_seed(seed)
    policy = sharpness * torch.randn(V, V, generator=g)
    return policy, policy + noise * torch.randn(V, V, generator=g)


def _sampled(policy: Tensor, sampling: Sampled, texts: int, tokens: int, seed: int = 1) -> list[Document]:
    """Texts that the policy has sampled behind a prompt of two tokens."""
    g = torch.Generator().manual_seed(seed)
    p = sampling.log_probs(policy).exp()
    ids = torch.randint(V, (texts, 2), generator=g)
    for _ in range(tokens):
        ids = torch.cat([ids, torch.multinomial(p[ids[:, -1]], 1, generator=g)], dim=1)
    mask = torch.arange(ids.shape[1]) >= 2
    rows = torch.nn.functional.one_hot(ids, V).float()
    return [Document(i, torch.zeros(len(i), 0), last, mask.clone(), 0) for i, last in zip(ids, rows, strict=True)]


def _engine(
    policy: Tensor, draft: Tensor, sampling: Sampled, relative: float, tokens: int, ids: Tensor | None
) -> float:
    """Tokens a step of speculative sampling as arXiv 2302.01318 has it, written out; proposals from the tempered draft."""
    g = torch.Generator().manual_seed(2)
    p = sampling.log_probs(policy).exp()
    q = torch.zeros(V, V)
    kept = torch.arange(V) if ids is None else ids
    if relative:
        q[:, kept] = (draft / (sampling.temperature * relative)).softmax(-1)
    else:
        q[torch.arange(V), kept[draft.argmax(-1)]] = 1.0
    walks = 2048
    last, made, steps = torch.randint(V, (walks,), generator=g), 0, 0
    for step in range(tokens):
        going, context, emitted = (
            torch.ones(walks, dtype=torch.bool),
            last.clone(),
            torch.zeros(walks, dtype=torch.long),
        )
        for _ in range(STEPS):
            drafted = torch.multinomial(q[context], 1, generator=g).squeeze(1)
            ratio = p[context, drafted] / q[context, drafted]
            accepted = torch.rand(walks, generator=g) < ratio
            rest = (p[context] - q[context]).clamp_min(0) + 1e-12
            instead = torch.multinomial(rest, 1, generator=g).squeeze(1)
            token = torch.where(accepted, drafted, instead)
            emitted += going
            last = torch.where(going, token, last)
            going &= accepted
            context = torch.where(going, token, context)
        bonus = torch.multinomial(p[context], 1, generator=g).squeeze(1)
        last, emitted = torch.where(going, bonus, last), emitted + going
        if step >= 8:  # the chain of texts has forgotten where it began
            made, steps = made + int(emitted.sum()), steps + walks
    return made / steps


@pytest.mark.parametrize(
    ("sampling", "pruned"),
    [(Sampled(0.6), False), (Sampled(), True), (Sampled(1.5, top_p=0.8), False), (Sampled(1.5, top_k=4), False)],
)
def test_each_temperature_makes_what_rejection_sampling_makes(sampling: Sampled, pruned: bool) -> None:
    policy, learnt = _world(1.5, 0.7)
    ids = torch.tensor([0, 2, 3, 5, 6, 7, 9, 11]) if pruned else None
    draft = learnt if ids is None else learnt[:, ids]
    batch = pack(_sampled(policy, sampling, 64, 256))
    how = {"steps": STEPS, "sampling": sampling}
    stats = replay_proposals(MarkovDraft(draft, ids), batch, torch.zeros(V, 1), policy.T.contiguous(), **how)
    for relative in DRAFT_TEMPERATURES:
        replayed = 1.0 + float(torch.tensor(stats.chances(relative)).cumprod(0).sum())
        # 16,384 tokens: a standard deviation of some 0.8 % of what is made beyond one token
        assert replayed == pytest.approx(_engine(policy, draft, sampling, relative, 40, ids), rel=0.03), relative


def test_what_samples_beats_what_is_greedy_where_the_policy_is_flat_and_loses_where_it_is_sharp() -> None:
    for sharpness, better in [(0.7, 1.0), (8.0, 0.0)]:
        policy, _ = _world(sharpness, 0.0)
        draft = 0.5 * policy  # has the order of the tokens, and is less sure than the policy
        batch = pack(_sampled(policy, Sampled(), 32, 256))
        stats = replay_proposals(
            MarkovDraft(draft), batch, torch.zeros(V, 1), policy.T.contiguous(), steps=STEPS, sampling=Sampled()
        )
        made = {t: stats.chances(t)[0] for t in (0.0, 1.0)}
        assert max(made, key=made.__getitem__) == better, (sharpness, made)


def test_a_perfect_draft_samples_without_a_miss_and_is_bound_by_the_likeliest_token_where_it_is_greedy() -> None:
    policy, _ = _world(1.0, 0.0)
    batch = pack(_sampled(policy, Sampled(), 32, 128))
    stats = replay_proposals(
        MarkovDraft(policy), batch, torch.zeros(V, 1), policy.T.contiguous(), steps=STEPS, sampling=Sampled()
    )
    assert stats.chances(1.0) == pytest.approx((1.0,) * STEPS)
    assert stats.chances(0.0) == stats.ceiling
    p = policy.softmax(-1)
    text = batch.input_ids[batch.rows]
    assert stats.mean_entropy == pytest.approx(float(-(p * p.log()).sum(-1)[text].mean()), rel=1e-5)


def test_a_walk_with_chances_of_0_and_1_is_the_replay_of_greedy_proposals() -> None:
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        documents = [
            Document(
                torch.randint(V, (n,), generator=g),
                torch.zeros(n, 0),
                torch.zeros(n, 1),
                torch.rand(n, generator=g) < 0.9,
                0,
            )
            for n in torch.randint(2, 30, (4,), generator=g).tolist()
        ]
        batch = pack(documents)
        valid = batch.valid(STEPS)
        match = (torch.rand(valid.shape, generator=g) < 0.6) & valid
        accepted, rounds = expected_replay(match.float()[None], valid, batch.rows)
        known, known_rounds = replay(match, valid, batch.rows)
        assert torch.equal(accepted[0], known)
        assert rounds[0] == known_rounds


def test_sums_of_batches_are_those_of_both_and_nothing_promises_nothing() -> None:
    policy, draft = _world(1.0, 0.5)
    documents = _sampled(policy, Sampled(), 8, 64)
    how = {"steps": STEPS, "sampling": Sampled()}

    def of(some: list[Document]) -> ProposalStats:
        return replay_proposals(MarkovDraft(draft), pack(some), torch.zeros(V, 1), policy.T.contiguous(), **how)

    together, apart = of(documents), of(documents[:3]) + of(documents[3:]) + ProposalStats.zeros(STEPS, sampled=True)
    assert torch.allclose(together.pack(), apart.pack())
    nothing = ProposalStats.zeros(STEPS, sampled=True)
    assert nothing.chances(1.0) == nothing.ceiling == ()
    assert nothing.mean_entropy == 0.0


def test_a_given_drafts_vocabulary_may_stand_in_any_order() -> None:
    policy, learnt = _world(1.5, 0.7)
    batch = pack(_sampled(policy, Sampled(), 8, 64))
    found = []
    for ids in (torch.tensor([0, 2, 3, 5, 9, 11]), torch.tensor([9, 2, 11, 0, 5, 3])):
        draft = MarkovDraft(learnt[:, ids], ids)
        how = {"steps": STEPS, "sampling": Sampled()}
        found.append(replay_proposals(draft, batch, torch.zeros(V, 1), policy.T.contiguous(), **how).pack())
    assert torch.allclose(*found)


def test_chains_that_are_as_good_as_over_cost_no_logits() -> None:
    policy, _ = _world(1.0, 0.0)
    useless = torch.full((V, V), -60.0)
    useless[:, 0] = 0.0  # always the same token
    batch = pack(_sampled(policy.index_fill(1, torch.tensor([0]), -80.0), Sampled(), 4, 64))
    draft = MarkovDraft(useless)
    stats = replay_proposals(draft, batch, torch.zeros(V, 1), policy.T.contiguous(), steps=STEPS, sampling=Sampled())
    assert draft.looked_at <= 2
    assert stats.chances(1.0)[0] < 0.01
