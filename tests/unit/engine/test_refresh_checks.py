"""Law 5: a refresh is all or nothing, whatever goes wrong. No engine: modules shaped like vLLM's, faults injected."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from builders.refresh_checks import HEADS, KV, D, H, I, V, Vocab, Weight
from torch import nn

from draft_training import digest, fingerprint
from spec_plugin.engine.refresh import swap as refresh
from spec_plugin.engine.refresh.layout import Layout, draft_layout


class QKV(nn.Module):
    def __init__(self, rank=0, ranks=1, kv=KV):
        super().__init__()
        self.total_num_heads, self.total_num_kv_heads, self.head_size, self.tp_rank = HEADS, kv, D, rank
        self.num_heads, self.num_kv_heads = HEADS // ranks, max(1, kv // ranks)
        self.num_kv_head_replicas = max(1, ranks // kv)
        self.weight = nn.Parameter(
            torch.randn((self.num_heads + 2 * self.num_kv_heads) * D, 2 * H), requires_grad=False
        )


class GateUp(nn.Module):
    def __init__(self, rank=0, ranks=1):
        super().__init__()
        self.output_sizes, self.tp_rank = [I, I], rank
        self.weight = nn.Parameter(torch.randn(2 * I // ranks, H), requires_grad=False)


class Row(nn.Module):
    def __init__(self, rows, columns, rank=0, ranks=1):
        super().__init__()
        self.input_size, self.input_size_per_partition, self.tp_rank = columns, columns // ranks, rank
        self.weight = nn.Parameter(torch.randn(rows, columns // ranks), requires_grad=False)


class Target(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens, self.lm_head = Vocab(V, 64), Vocab(V, 64)


class FakeEagle3Draft(nn.Module):
    """Owns fc, one fused layer, a pruned head and d2t; shares the embedding."""

    has_own_embed_tokens = False

    def __init__(self, target: Target, rank=0, ranks=1, kv=KV):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=V, draft_vocab_size=8)
        self.model = nn.Module()
        self.model.embed_tokens = target.model.embed_tokens
        layer = nn.Module()
        layer.self_attn, layer.mlp = nn.Module(), nn.Module()
        layer.self_attn.qkv_proj, layer.self_attn.o_proj = QKV(rank, ranks, kv), Row(H, HEADS * D, rank, ranks)
        layer.mlp.gate_up_proj = GateUp(rank, ranks)
        self.model.layers = nn.ModuleList([layer])
        self.model.fc = Weight(H, 3 * H)
        self.lm_head = Vocab(8, 16)
        self.draft_id_to_target_id = nn.Parameter(torch.zeros(8, dtype=torch.long), requires_grad=False)

    def load_weights(self, weights):
        layout = draft_layout(self, Target())
        for name, tensor in weights:
            slot = layout.slots[layout.canonical(name)]
            live = slot.live(layout.parameters)
            live.copy_(slot.shard(tensor, live))


def whole(seed: int, kv=KV) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = {
        "fc.weight": (H, 3 * H),
        "midlayer.self_attn.q_proj.weight": (HEADS * D, 2 * H),
        "midlayer.self_attn.k_proj.weight": (kv * D, 2 * H),
        "midlayer.self_attn.v_proj.weight": (kv * D, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, HEADS * D),
        "midlayer.mlp.gate_proj.weight": (I, H),
        "midlayer.mlp.up_proj.weight": (I, H),
        "lm_head.weight": (8, H),
    }
    tensors = {n: torch.randn(s, generator=g) for n, s in shapes.items()}
    return {**tensors, "d2t": torch.arange(8) * 2, "t2d": torch.zeros(V, dtype=torch.bool)}


@pytest.fixture
def draft() -> FakeEagle3Draft:
    torch.manual_seed(0)
    return FakeEagle3Draft(Target())


@pytest.fixture
def layout(draft) -> Layout:
    target = Target()
    target.model.embed_tokens = draft.model.embed_tokens
    return draft_layout(draft, target)


def bits(draft) -> list[torch.Tensor]:
    return [p.detach().clone() for p in draft.parameters()]


def same(a, b) -> bool:
    return all(refresh.same_bits(x, y) for x, y in zip(a, b, strict=True))


def test_the_layout_names_what_the_draft_owns_and_what_the_target_does(layout):
    assert set(layout.slots) == set(whole(0)) - {"t2d"}
    assert layout.shared == {"embed_tokens.weight": "model.embed_tokens.weight"}
    assert layout.slots["lm_head.weight"].shape == (8, H), "padding rows are vLLM's, not the checkpoint's"
    assert layout.problem is None


def test_a_whole_fresh_refresh_is_installed_bit_for_bit(draft, layout):
    tensors = whole(1)
    assert refresh.check_arrived(layout, tensors, 5, 4, digest(tensors)) is None
    assert refresh.swap(layout, tensors, draft.load_weights) is None
    assert refresh.mismatch(layout, tensors) is None
    live = layout.live_tensors()
    assert all(torch.equal(live[n], tensors[n]) for n in live)


def test_both_spellings_of_the_one_layer_are_read(layout):
    tensors = {n.replace("midlayer.", "layers.0."): t for n, t in whole(1).items()}
    assert refresh.check_arrived(layout, tensors, 5, 4, digest(tensors)) is None


def without(name):
    return lambda t: {k: v for k, v in t.items() if k != name}


def changed(name, make):
    return lambda t: {**t, name: make(t.get(name))}


FAULTS = {
    "missing": (without("fc.weight"), "missing ['fc.weight']"),
    "missing vocabulary map": (without("d2t"), "missing ['d2t']"),
    "unknown": (changed("extra.weight", lambda _: torch.ones(1)), "unknown ['extra.weight']"),
    "shape": (changed("fc.weight", lambda t: t[:-1]), "fc.weight has shape (15, 48), the draft needs (16, 48)"),
    "transposed": (changed("midlayer.mlp.up_proj.weight", lambda t: t.T), "has shape (16, 24)"),
    "NaN": (
        changed("fc.weight", lambda t: t.clone().index_fill_(0, torch.tensor(3), float("nan"))),
        "not finite in 48",
    ),
    "infinite": (changed("lm_head.weight", lambda t: t * float("inf")), "not finite"),
    "integers": (changed("fc.weight", lambda t: t.int()), "is torch.int32"),
    "shared": (changed("embed_tokens.weight", lambda _: torch.zeros(V, H)), "is the target's own parameter"),
    "map out of range": (changed("d2t", lambda t: t + V), "expected 0 to 39"),
    "map negative": (changed("d2t", lambda t: t - 1), "makes draft token 0 the target's token -1"),
    "map not one to one": (changed("d2t", lambda t: -torch.arange(8)), "that another one has"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_refresh_is_refused_and_says_why(layout, fault):
    make, expected = FAULTS[fault]
    tensors = make(whole(1))
    reason = refresh.check_arrived(layout, tensors, 5, 4, digest(tensors))
    assert reason is not None and expected in reason


def test_a_value_that_overflows_in_the_served_dtype_is_refused(draft):
    target = Target()
    target.model.embed_tokens = draft.half().model.embed_tokens
    layout = draft_layout(draft, target)
    tensors = {**whole(1), "fc.weight": torch.full((H, 3 * H), 1e6)}
    reason = refresh.check_arrived(layout, tensors, 5, 4, digest(tensors))
    assert reason is not None and "not finite" in reason and "float16" in reason


@pytest.mark.parametrize("made", [digest, fingerprint])
def test_one_flipped_bit_on_the_way_is_refused(layout, made):
    tensors = whole(1)
    sent = made(tensors)
    assert refresh.check_arrived(layout, tensors, 5, 4, sent) is None
    tensors["lm_head.weight"].view(torch.int32)[3, 5] ^= 1
    reason = refresh.check_arrived(layout, tensors, 5, 4, sent)
    assert reason is not None and "digest differs" in reason


@pytest.mark.parametrize(("version", "served", "refused"), [(5, 5, True), (5, 6, True), (5, 4, False), (5, -1, False)])
def test_a_stale_version_is_refused_unless_forced(layout, version, served, refused):
    tensors = whole(1)
    reason = refresh.check_arrived(layout, tensors, version, served, digest(tensors))
    assert (reason is not None and "stale" in reason) if refused else reason is None
    assert refresh.check_arrived(layout, tensors, version, served, digest(tensors), force=True) is None


def loaders(draft):
    def crash_half_way(weights):
        draft.load_weights(weights[: len(weights) // 2])
        raise OSError("connection lost")

    def skip_one(weights):
        draft.load_weights([w for w in weights if "up_proj" not in w[0]])

    def swap_query_and_key(weights):
        tensors = dict(weights)
        q, k = (f"midlayer.self_attn.{x}_proj.weight" for x in "qk")
        tensors[k], tensors[q] = tensors[q][: tensors[k].shape[0]], tensors[q].roll(1, 0)
        draft.load_weights(tensors.items())

    def interrupted(weights):
        draft.load_weights(weights[:3])
        raise KeyboardInterrupt

    return {f.__name__: f for f in (crash_half_way, skip_one, swap_query_and_key, interrupted)}


@pytest.mark.parametrize("fault", ["crash_half_way", "skip_one", "swap_query_and_key"])
def test_a_failing_swap_puts_the_previous_draft_back(draft, layout, fault):
    before = bits(draft)
    reason = refresh.swap(layout, whole(1), loaders(draft)[fault])
    assert reason is not None and same(before, bits(draft))


def test_an_interrupted_swap_puts_the_previous_draft_back(draft, layout):
    before = bits(draft)
    with pytest.raises(KeyboardInterrupt):
        refresh.swap(layout, whole(1), loaders(draft)["interrupted"])
    assert same(before, bits(draft))


def test_one_rank_that_fails_makes_all_ranks_restore(draft, layout):
    before = bits(draft)
    reason = refresh.swap(layout, whole(1), draft.load_weights, agree=lambda ok: False)
    assert reason == "another rank could not install it" and same(before, bits(draft))


def test_a_rank_without_memory_for_the_previous_draft_says_so_to_the_others(draft, layout, monkeypatch):
    """Else they wait in a collective call for a rank that has gone; nothing was loaded, so nothing is put back."""
    before, asked = bits(draft), []

    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError("no room on the host")

    def agree(ok: bool) -> bool:
        asked.append(ok)
        return ok

    monkeypatch.setattr(torch.Tensor, "to", no_memory)
    reason = refresh.swap(layout, whole(1), draft.load_weights, agree=agree)
    monkeypatch.undo()
    assert asked == [False] and reason == "MemoryError while keeping the previous draft: no room on the host"
    assert same(before, bits(draft))


@pytest.mark.parametrize("kv", [2, 1])
def test_two_ranks_hold_the_two_halves_and_share_replicated_heads(kv):
    tensors = {n: t for n, t in whole(1, kv).items() if n != "t2d"}
    drafts = [FakeEagle3Draft(Target(), rank, 2, kv) for rank in (0, 1)]
    layouts = [draft_layout(d, Target()) for d in drafts]
    for d, layout in zip(drafts, layouts, strict=True):
        assert {n: s.shape for n, s in layout.slots.items() if n in tensors} == {
            n: tuple(t.shape) for n, t in tensors.items()
        }
        assert refresh.swap(layout, tensors, d.load_weights) is None
    q = [layout.live_tensors()["midlayer.self_attn.q_proj.weight"] for layout in layouts]
    assert torch.equal(torch.cat(q), tensors["midlayer.self_attn.q_proj.weight"])
    o = [layout.live_tensors()["midlayer.self_attn.o_proj.weight"] for layout in layouts]
    assert torch.equal(torch.cat(o, 1), tensors["midlayer.self_attn.o_proj.weight"])
    k = [layout.live_tensors()["midlayer.self_attn.k_proj.weight"] for layout in layouts]
    assert torch.equal(torch.cat(k) if kv == 2 else k[1], tensors["midlayer.self_attn.k_proj.weight"])
    up = [layout.live_tensors()["midlayer.mlp.up_proj.weight"] for layout in layouts]
    assert torch.equal(torch.cat(up), tensors["midlayer.mlp.up_proj.weight"])


@pytest.mark.parametrize("how", ["packed", "eight bit", "latent attention"])
def test_a_draft_that_cannot_be_refreshed_says_why(draft, how):
    if how == "packed":
        draft.model.fc.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    elif how == "eight bit":
        draft.model.fc.weight = nn.Parameter(torch.zeros(H, 3 * H, dtype=torch.int8), requires_grad=False)
    else:
        draft.model.layers[0].W_UK_T = torch.zeros(1)
    reason = refresh.check_arrived(draft_layout(draft, Target()), whole(1), 5, 4, "")
    assert reason is not None and reason.startswith("this draft cannot be refreshed")


def test_law_5_a_parameter_that_was_replaced_is_seen_though_its_numbers_are_right(draft, layout):
    """Captured graphs, and kernels with packed copies, go on reading where it was."""
    before, tensors = bits(draft), whole(1)

    def load(pairs):
        draft.load_weights(pairs)
        draft.model.fc.weight.data = draft.model.fc.weight.detach().clone()

    reason = refresh.swap(layout, tensors, load)
    assert reason is not None and "was replaced by another tensor while loading" in reason
    assert same(bits(draft), before)


def test_law_5_weights_that_could_not_be_put_back_are_said_to_be_none(layout):
    class Stuck:
        """Takes nothing in, and says nothing."""

        def __init__(self) -> None:
            self.data, self.held = self, torch.ones(2)

        def copy_(self, _: torch.Tensor) -> None:
            pass

        def detach(self) -> torch.Tensor:
            return self.held

    stuck = type("Stuck", (), {"parameters": {"fc.weight": Stuck()}})()
    with pytest.raises(RuntimeError, match=r"could not be restored, fc\.weight differs"):
        refresh.restore(stuck, {"fc.weight": torch.zeros(2)})
