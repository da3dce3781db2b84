"""Which tokens' states are kept for the evidence of exact sampling, and how they find their batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders.spec_run import run_of
from builders.training import LAYERS, TARGET, H
from torch import Tensor, nn

from spec_plugin import SpecConfig
from spec_plugin.api.events import ChosenStates, TargetInfo
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.trainer.evidence import MOST, ON_CARD, EvidenceTap, tokens_of_a_turn
from spec_plugin.trainer.harvest import DecoderHarvest, PackedShards, RolloutHarvest, padded_rows


class Actor:
    """A policy whose states are the token ids that it reads, with the tap of one process."""

    def __init__(self, block: tuple[str, ...] = (), shards: Any = None, **options: Any) -> None:
        self.session = SpecSession(SpecConfig(**options), TARGET, create_manager(block, load_entry_points=False))
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([nn.Dropout(0.0) for _ in range(LAYERS)])
        self.decoder.norm = nn.Identity()
        self.harvest = DecoderHarvest(run_of(self.session, None), lambda: self.decoder, shards)
        self.tap = EvidenceTap(self.harvest, self.session)

    def step(self, version: int, *documents: Tensor, read: int = 2, padded: bool = False) -> None:
        """A weight sync and the log-prob pass behind it; all but the first ``read`` tokens were sampled."""
        self.tap.begin(version)
        self.harvest.open()
        self.passes(*documents, read=read, padded=padded)
        self.harvest.close()

    def passes(self, *documents: Tensor, read: int = 2, padded: bool = False) -> None:
        masks = [torch.arange(len(document)) >= read for document in documents]
        state = torch.cat(documents)[None, :, None].float().repeat(1, 1, 4)
        rows = None
        if padded:
            state = nn.utils.rnn.pad_sequence(documents, batch_first=True)[..., None].float().repeat(1, 1, 4)
            rows = padded_rows([0] * len(documents), [len(document) for document in documents])
        with self.tap.capture(lambda: (documents, masks), rows):
            self.decoder.norm(state)

    def of(self, *documents: Tensor, read: int = 2) -> ChosenStates:
        found = self.tap.of(documents, [read] * len(documents))
        assert found is not None
        return found


def text(n: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 90, (n,), generator=torch.Generator().manual_seed(seed))


def places(found: ChosenStates) -> set[tuple[int, int]]:
    return set(zip(found.rows.tolist(), found.columns.tolist(), strict=True))


@pytest.mark.parametrize("padded", [False, True])
def test_the_states_are_those_before_the_tokens_and_find_their_rows_in_any_order(padded):
    actor, first, second = Actor(), text(40), text(30, 1)
    actor.step(0, first, second)
    actor.step(1, first, second, padded=padded)
    found = actor.of(second, first)
    assert len(found.rows) == found.chosen == 38 - 1 + 28 - 1, (
        "few tokens: all but each first one, which is never drafted"
    )
    for row, column, token, state in zip(found.rows, found.columns, found.tokens, found.last, strict=True):
        document = (second, first)[int(row)]
        assert token == document[column + 2] and (state == document[column + 1]).all()
    assert found.passed == 66


def test_the_first_step_only_counts_tokens():
    actor = Actor()
    actor.step(0, text(40))
    assert (len(actor.of(text(40)).rows), actor.of(text(40)).passed) == (0, 38)


def test_law_2_whether_a_token_is_chosen_depends_on_no_token_and_on_no_later_length(monkeypatch):
    monkeypatch.setattr("spec_plugin.trainer.evidence.tokens_of_a_turn", lambda _: (20, 1))
    chosen = []
    for last in (text(40, 5), text(80, 6)):
        actor = Actor()
        actor.step(0, text(60))
        actor.step(1, text(60, len(last)), last)
        found = actor.of(text(60, len(last)), last)
        chosen.append({(row, column) for row, column in places(found) if column < 38})
    assert chosen[0] == chosen[1] and 5 < len(chosen[0]) < 60


def test_law_2_each_step_and_each_rank_throws_coins_of_its_own(monkeypatch):
    monkeypatch.setattr("spec_plugin.trainer.evidence.tokens_of_a_turn", lambda _: (20, 1))
    found = []
    for rank in (0, 1):
        monkeypatch.setattr("spec_plugin.trainer.evidence.rank", lambda rank=rank: rank)
        actor = Actor()
        for version in range(3):
            actor.step(version, text(60))
            found.append(places(actor.of(text(60))))
    assert not found[0] and len({frozenset(some) for some in found[1:3] + found[4:]}) == 4


def test_law_2_ranks_take_turns_by_the_version_alone(monkeypatch):
    monkeypatch.setattr("spec_plugin.trainer.evidence.tokens_of_a_turn", lambda _: (1000, 3))
    had = {}
    for rank in range(3):
        monkeypatch.setattr("spec_plugin.trainer.evidence.rank", lambda rank=rank: rank)
        actor = Actor()
        for version in range(7):
            actor.step(version, text(20))
            had[rank, version] = len(places(actor.of(text(20)))) > 0
    assert all(had[rank, version] == ((rank + version) % 3 == 0) for rank, version in had if version > 0)


def test_what_it_takes_is_chosen_by_count(monkeypatch):
    monkeypatch.setattr("spec_plugin.trainer.evidence.tokens_of_a_turn", lambda _: (100, 1))
    actor, counts = Actor(), []
    for version in range(1, 30):
        documents = [text(500, seed) for seed in range(4)]
        actor.step(version, *documents)
        counts.append(len(actor.of(*documents).rows))
    assert 90 < sum(counts[1:]) / 28 < 110


def test_text_that_was_sampled_twice_counts_twice_and_no_row_more_often():
    actor, same = Actor(), text(20)
    for version in range(2):
        actor.step(version, same, same)
    assert len(actor.of(same, same, same).rows) == 2 * 17
    assert not len(actor.of(same).rows), "and not in another check"


def test_passes_after_the_pass_and_runs_that_have_failed_are_left_alone():
    actor = Actor()
    actor.step(0, text(40))
    actor.tap.begin(1)
    actor.passes(text(40))  # of another model, say
    assert actor.tap.of([text(40)], [2]) is None
    actor.session.fail(actor_work(), "trouble")
    actor.step(2, text(40))
    assert actor.tap.of([text(40)], [2]) is None


def actor_work() -> Any:
    from spec_plugin.api.speculation import Reason

    return Reason.TRAINING


class Shards(PackedShards):
    def __init__(self) -> None:
        self.rank, self.size = 0, 2
        self.group: Any = None


@pytest.mark.parametrize(
    ("actor", "why"), [({"block": ("exactness",)}, ""), ({"shards": Shards()}, "ranks share documents")]
)
def test_nothing_is_kept_where_nobody_asks_or_documents_are_seen_in_parts(actor, why):
    made = Actor(**actor)
    for version in range(2):
        made.step(version, text(40))
    assert made.tap.of([text(40)], [2]) is None and made.tap.none_for(False, True).startswith(why)
    assert bool(made.tap.none_for(False, True)) == bool(why)


@pytest.mark.parametrize("options", [{"train": False}, {"method": "ngram"}])
def test_law_2_methods_that_harvest_nothing_have_evidence_too(options):
    actor = Actor(**options)
    for version in range(2):
        actor.step(version, text(40))
    assert len(actor.of(text(40)).rows) == 37 and not actor.tap.none_for(False, True)


def test_why_a_run_has_none_is_known_to_the_tap():
    actor = Actor()
    assert "overlap" in actor.tap.none_for(True, True) and "log-probs" in actor.tap.none_for(False, False)
    assert "Megatron" in EvidenceTap(RolloutHarvest(run_of(actor.session, None)), actor.session).none_for(False, True)


def test_law_6_trouble_ends_the_evidence_alone_and_leaves_no_hooks(caplog):
    actor = Actor()
    actor.step(0, text(40))
    actor.tap.begin(1)
    actor.harvest.open()
    for _ in range(2):
        with actor.tap.capture(lambda: ([text(40)], [torch.arange(40) > 1])):
            pass  # a pass that does not run the decoder
    assert not actor.session.failed and not actor.decoder.norm._forward_hooks
    (line,) = [r.getMessage() for r in caplog.records]
    assert "no hidden states were captured" in line and actor.tap.none_for(False, True) in line
    assert actor.tap.of([text(40)], [2]) is None


@pytest.mark.parametrize(("p", "training", "noisy"), [(0.1, True, True), (0.1, False, False), (0.0, True, False)])
def test_a_policy_that_drops_out_is_said_to(p, training, noisy):
    actor = Actor()
    actor.decoder.layers[3] = nn.Dropout(p)
    actor.decoder.train(training)
    for version in range(2):
        actor.step(version, text(40))
    assert actor.of(text(40)).noisy == noisy


def test_seconds_of_a_core_are_turned_into_tokens_by_sizes_alone():
    def target(vocabulary: int, hidden: int, device: str = "cpu") -> TargetInfo:
        return TargetInfo("", {"vocab_size": vocabulary, "hidden_size": hidden}, "bfloat16", device_type=device)

    assert tokens_of_a_turn(target(151_936, 1024)) == (17, 1)
    assert tokens_of_a_turn(target(151_936, 4096)) == (29, 4)
    assert tokens_of_a_turn(target(64, H)) == (MOST, 1) and tokens_of_a_turn(target(151_936, 4096, "cuda")) == (
        ON_CARD,
        1,
    )
