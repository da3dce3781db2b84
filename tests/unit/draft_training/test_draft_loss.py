from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from builders.drafts import TINY, make_document, make_policy

from draft_training import Document, DraftConfig, Eagle3Draft, LossStats, pack, ttt_loss
from draft_training import attention as attention_module
from draft_training.layers import initialise
from draft_training.loss import replay

STEPS = 3


def make_draft(config: DraftConfig, seed: int = 1, dtype: torch.dtype = torch.float64) -> Eagle3Draft:
    draft = Eagle3Draft(config, dtype=dtype)
    initialise(draft, torch.Generator().manual_seed(seed), std=0.3)
    return draft


class EngineReference:
    """Independent and slow: one token at a time with a key-value cache, as vLLM's proposer drafts, one document each."""

    def __init__(self, draft: Eagle3Draft, embed: torch.Tensor, head: torch.Tensor) -> None:
        self.w = {name: p for name, p in draft.named_parameters()}
        self.c, self.embed, self.head = draft.config, embed, head
        self.ids = (torch.arange(draft.d2t.numel()) + draft.d2t) if draft.config.pruned else torch.arange(len(embed))

    def norm(self, x, name):
        return x / (x.pow(2).mean() + self.c.rms_norm_eps).sqrt() * self.w[name]

    def turn(self, x, position):  # rotary embedding as a complex rotation, x: [heads, D]
        half = x.shape[-1] // 2
        inverse = 1.0 / self.c.rope.theta ** (torch.arange(half) * 2 / x.shape[-1])  # float32, like the engine's
        angle = torch.complex((position * inverse).cos(), (position * inverse).sin()).to(torch.complex128)
        z = torch.complex(x[:, :half], x[:, half:]) * angle
        return torch.cat([z.real, z.imag], -1)

    def token(self, token_id, hidden, position, cache):
        """One pass of the draft for one token: (logits, hidden state to feed back); appends to ``cache``."""
        c, at = self.c, "midlayer.self_attn."
        e = self.norm(self.embed[token_id], "midlayer.input_layernorm.weight")
        normed = self.norm(hidden, "midlayer.hidden_norm.weight")
        x = torch.cat([e, normed])
        q = self.turn((self.w[at + "q_proj.weight"] @ x).view(c.num_heads, -1), position)
        k = self.turn((self.w[at + "k_proj.weight"] @ x).view(c.num_kv_heads, -1), position)
        cache.append((k, (self.w[at + "v_proj.weight"] @ x).view(c.num_kv_heads, -1)))
        outs = []
        for h in range(c.num_heads):
            g = h // (c.num_heads // c.num_kv_heads)
            scores = torch.stack([q[h] @ key[g] for key, _ in cache]) / c.head_dim**0.5
            outs.append(scores.softmax(0) @ torch.stack([value[g] for _, value in cache]))
        residual = (normed if c.norm_before_residual else hidden) + self.w[at + "o_proj.weight"] @ torch.cat(outs)
        y = self.norm(residual, "midlayer.post_attention_layernorm.weight")
        m = "midlayer.mlp."
        gate = F.silu(self.w[m + "gate_proj.weight"] @ y) * (self.w[m + "up_proj.weight"] @ y)
        out = residual + self.w[m + "down_proj.weight"] @ gate
        head = self.w["lm_head.weight"] if c.pruned else self.head
        normed_out = self.norm(out, "norm.weight")
        return head @ normed_out, normed_out if c.norm_output else out

    def document(self, d: Document, steps: int):
        """Yield (step, anchor, draft logits) for every anchor whose whole chain was sampled, as the engine would ask."""
        n, cache = len(d), []
        firsts = [self.token(d.input_ids[t + 1], self.w["fc.weight"] @ d.aux[t], t, cache) for t in range(n - 1)]
        for t in range(n - 1):
            own = cache[: t + 1]
            logits, hidden = firsts[t]
            for j in range(steps):
                if t + 2 + j >= n or not bool(d.loss_mask[t + 1 : t + 3 + j].all()):
                    break
                if j:
                    logits, hidden = self.token(d.input_ids[t + 1 + j], hidden, t + j, own)
                yield j, t, logits

    def sums(self, documents, steps=STEPS):
        kl, count = [0.0] * steps, [0] * steps
        for d in documents:
            for j, t, logits in self.document(d, steps):
                full = (self.head @ d.last[t + 1 + j]).softmax(0)
                p = full[self.ids] / full[self.ids].sum()
                inside = bool((self.ids == d.input_ids[t + 2 + j]).any())
                kl[j] = kl[j] + (p * (p.log() - logits.log_softmax(0))).sum() * inside
                count[j] += 1
        return kl, count

    def drafted(self, d: Document, t: int, steps: int) -> list[int]:
        """The greedy tokens of the round that begins at anchor t; of the document's tokens those up to t + 1 are read."""
        cache, tokens = [], []
        for s in range(t + 1):
            logits, hidden = self.token(d.input_ids[s + 1], self.w["fc.weight"] @ d.aux[s], s, cache)
        while len(tokens) < steps:
            if tokens:
                logits, hidden = self.token(tokens[-1], hidden, t + len(tokens), cache)
            tokens.append(int(self.ids[logits.argmax()]))
        return tokens


def documents(dtype=torch.float64):
    gap = make_document(11, 5, dtype=dtype)
    gap.loss_mask[6:8] = False  # a tool's answer between two responses
    return [
        make_document(9, 1, dtype=dtype),
        make_document(4, 2, prompt=1, dtype=dtype),
        gap,
        make_document(7, 3, prompt=0, dtype=dtype),
    ]


@pytest.mark.parametrize("scores", ["fused", "explicit", "explicit, in chunks"])
@pytest.mark.parametrize("kind", ["full", "pruned", "pruned, head frozen", "norm_before_residual", "residual fed back"])
def test_loss_statistics_and_gradients_equal_an_engine_like_reference(kind, scores, monkeypatch):
    if scores != "fused":
        monkeypatch.setattr(attention_module, "proven_kernel", lambda *_: None)
    if scores == "explicit, in chunks":
        monkeypatch.setattr(attention_module, "QUERY_CHUNK", 3)
    config = DraftConfig.from_target(TINY, draft_vocab_size=12 if kind.startswith("pruned") else None)
    if kind == "norm_before_residual":
        config = DraftConfig.from_hf({**config.to_hf(), "norm_before_residual": True})
    if kind == "residual fed back":
        config = DraftConfig.from_hf({**config.to_hf(), "norm_output": False})
    draft = make_draft(config)
    embed, head = make_policy(dtype=torch.float64)
    if kind.startswith("pruned"):
        draft.set_vocabulary(torch.arange(12) * 3)
        draft.refresh_head(head)
        if kind == "pruned":
            draft.lm_head.weight.data.mul_(1.1)  # it is trained, and has gone its own way
        draft.lm_head.weight.requires_grad_(kind == "pruned")
    kl, count = EngineReference(draft, embed, head).sums(documents())
    expected = sum(kl[j] / count[j] for j in range(STEPS))
    trained = {name: p for name, p in draft.named_parameters() if p.requires_grad}
    expected_grads = torch.autograd.grad(expected, list(trained.values()))
    loss, stats = ttt_loss(draft, pack(documents()), embed, head, steps=STEPS, chunk_elements=3 * len(embed))
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-10)
    for (name, p), g in zip(trained.items(), expected_grads, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-7, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")
    assert stats.count.tolist() == count
    torch.testing.assert_close(stats.kl, torch.stack(kl).detach())


def test_packed_documents_do_not_see_each_other(tiny):
    draft, (embed, head) = make_draft(tiny), make_policy(dtype=torch.float64)
    one, other = make_document(9, 1, dtype=torch.float64), make_document(12, 2, dtype=torch.float64)
    changed = make_document(12, 99, dtype=torch.float64)
    alone = ttt_loss(draft, pack([one]), embed, head, steps=STEPS)[1].pack()
    for neighbour in (other, changed):
        rest = ttt_loss(draft, pack([neighbour]), embed, head, steps=STEPS)[1].pack()
        for order in ([one, neighbour], [neighbour, one]):
            both = ttt_loss(draft, pack(order), embed, head, steps=STEPS)[1].pack()
            torch.testing.assert_close(both, alone + rest, rtol=1e-10, atol=1e-12)


def test_the_policys_tensors_and_the_harvest_receive_no_gradient(tiny):
    draft, (embed, head) = make_draft(tiny), make_policy(dtype=torch.float64)
    embed.requires_grad_(), head.requires_grad_()
    d = make_document(9, 1, dtype=torch.float64)
    d.aux.requires_grad_(), d.last.requires_grad_()
    ttt_loss(draft, pack([d]), embed, head, steps=2)[0].backward()
    assert all(t.grad is None for t in (embed, head, d.aux, d.last))


def test_statistics_add_up_over_batches(tiny):
    draft, (embed, head) = make_draft(tiny), make_policy(dtype=torch.float64)
    docs = documents()
    whole = ttt_loss(draft, pack(docs), embed, head, steps=STEPS)[1]
    parts = (
        ttt_loss(draft, pack(docs[:2]), embed, head, steps=STEPS)[1]
        + ttt_loss(draft, pack(docs[2:]), embed, head, steps=STEPS)[1]
    )
    torch.testing.assert_close(whole.pack(), parts.pack())


def test_no_temporary_holds_the_vocabulary_for_all_positions(tiny, monkeypatch):
    draft, (embed, head) = make_draft(tiny, dtype=torch.float32), make_policy()
    seen = []
    original = torch.Tensor.logsumexp
    monkeypatch.setattr(torch.Tensor, "logsumexp", lambda x, *a: seen.append(x.numel()) or original(x, *a))
    ttt_loss(draft, pack([make_document(60, 1)]), embed, head, steps=2, chunk_elements=200)
    assert seen and max(seen) <= 200


def test_the_replay_counts_rounds_as_the_engine_would():
    # 8 anchors in one span, k=2; hits per anchor: 2 -> next round 3 on, 0 -> 1 on, 1 -> 2 on, then too short to count
    rows = torch.arange(10, 18)
    valid = torch.ones(2, 8, dtype=torch.bool)
    valid[1, 0] = False  # no anchor that far back
    match = torch.zeros(2, 8, dtype=torch.bool)
    match[0, 0] = match[1, 1] = True  # anchor 0: both drafts hit
    match[1, 4] = True  # anchor 3: the second would hit, but the first missed: round over
    match[0, 4] = True  # anchor 4: one hit
    accepted, rounds = replay(match, valid, rows)
    # rounds start at anchors 0, 3, 4, 6; anchor 7's window is cut by the end of the span
    assert accepted.tolist() == [2.0, 1.0] and float(rounds) == 4.0


def test_a_replayed_round_never_crosses_into_the_next_span():
    rows = torch.tensor([3, 4, 5, 20, 21, 22])
    valid = torch.tensor([[True] * 6, [False, True, True, False, True, True]])
    match = torch.ones(2, 6, dtype=torch.bool)
    accepted, rounds = replay(match, valid, rows)
    assert float(rounds) == 2.0 and accepted.tolist() == [2.0, 2.0]


def test_the_acceptance_length_is_one_as_long_as_nothing_was_replayed():
    stats = LossStats.zeros(3)
    stats.count[:] = 10
    assert stats.acceptance_length == 1.0 and stats.chances == ()


def test_a_perfect_draft_has_acceptance_length_k_plus_one(tiny):
    draft, (embed, head) = make_draft(tiny), make_policy(dtype=torch.float64)
    d = make_document(40, 3, dtype=torch.float64)
    ids = d.input_ids.clone()
    with torch.no_grad():  # let the "policy" sample what the draft proposes
        for t in range(3, 38):
            probe = Document(ids, d.aux, d.last, d.loss_mask, 0)
            reference = EngineReference(draft, embed, head)
            cache = []
            for s in range(t):
                logits, _ = reference.token(ids[s + 1], reference.w["fc.weight"] @ probe.aux[s], s, cache)
            ids[t + 1] = logits.argmax()
    stats = ttt_loss(draft, pack([Document(ids, d.aux, d.last, d.loss_mask, 0)]), embed, head, steps=1)[1]
    assert stats.acceptance_length == 2.0


@pytest.mark.parametrize("draft_vocabulary", [None, 12])
def test_rounds_and_accepted_tokens_are_those_of_a_rollout_that_an_engine_decoded(draft_vocabulary):
    draft = make_draft(DraftConfig.from_target(TINY, draft_vocab_size=draft_vocabulary))
    embed, head = make_policy(dtype=torch.float64)
    if draft_vocabulary:
        draft.set_vocabulary(torch.arange(12) * 3)
        draft.refresh_head(head)
    d, t = make_document(22, 3, dtype=torch.float64), 2  # the first sampled token is the fourth
    with torch.no_grad():
        for hits in (3, 0, 1, 2, 3, 3):  # of each round, then a token that was not drafted
            tokens = EngineReference(draft, embed, head).drafted(d, t, STEPS)
            d.input_ids[t + 2 : t + 2 + hits] = torch.tensor(tokens[:hits], dtype=torch.int64)
            if hits < STEPS:
                d.input_ids[t + 2 + hits] = (tokens[hits] + 1) % len(embed)
            t += hits + 1
    stats = ttt_loss(draft, pack([d]), embed, head, steps=STEPS)[1]
    assert float(stats.rounds) == 6 and stats.accepted.tolist() == [5, 4, 3]


@pytest.mark.parametrize("cap", [None, 3.0])
def test_what_is_learned_are_the_targets_logits_cap_and_all(cap):
    config = DraftConfig.from_target(TINY)
    draft, (embed, head) = make_draft(config), make_policy(dtype=torch.float64)
    batch = pack([make_document(12, 3, dtype=torch.float64)], "cpu")
    loss, _ = ttt_loss(draft, batch, embed, head, steps=1, cap=cap)
    (state,) = draft.states(batch, embed, 1)
    student = (state[batch.rows - 1] @ head.T).log_softmax(-1)
    logits = batch.last[batch.rows] @ head.T
    teacher = (logits if cap is None else cap * (logits / cap).tanh()).log_softmax(-1)
    valid = batch.valid(1)[0]
    kl = (teacher.exp() * (teacher - student)).sum(-1)[valid]
    torch.testing.assert_close(loss, kl.mean())


@pytest.mark.parametrize("pruned", [False, True])
def test_chains_weigh_the_same_in_chunks_and_a_token_that_no_draft_can_say_ends_its_chain(pruned: bool) -> None:
    config = DraftConfig.from_target(TINY, draft_vocab_size=12 if pruned else None)
    embed, head = make_policy(dtype=torch.float64)
    gradients = []
    for chunk_elements in (3 * len(embed), 1 << 20):
        draft = make_draft(config)
        if pruned:
            draft.set_vocabulary(torch.arange(12) * 3)
            draft.refresh_head(head)
            draft.lm_head.weight.requires_grad_(False)
        batch = pack(documents())
        loss, stats = ttt_loss(draft, batch, embed, head, steps=STEPS, smoothing=0.5, chunk_elements=chunk_elements)
        loss.backward()
        gradients.append([p.grad for p in draft.parameters() if p.grad is not None])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)
    alike, same = ttt_loss(draft, batch, embed, head, steps=STEPS)
    assert torch.equal(same.kl, stats.kl), "what is measured does not depend on what is descended"
    assert not torch.isclose(alike, loss)


def test_a_draft_that_trains_its_own_head_weighs_all_positions_alike() -> None:
    config = DraftConfig.from_target(TINY, draft_vocab_size=12)
    embed, head = make_policy(dtype=torch.float64)
    losses = []
    for smoothing in (None, 0.5):
        draft = make_draft(config)
        draft.set_vocabulary(torch.arange(12) * 3)
        draft.refresh_head(head)
        draft.lm_head.weight.requires_grad_(True)
        losses.append(ttt_loss(draft, pack(documents()), embed, head, steps=STEPS, smoothing=smoothing)[0])
    assert torch.equal(*losses)
