"""SpecRun: the order of a step, and what an adapter is told that does not keep it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders.batches import kept_of, span_of
from builders.law6_faults import FakeLink, Fault
from builders.training import LAYERS, TARGET
from torch import nn

from spec_plugin import LogprobProvenanceError, SpecConfig, hookimpl
from spec_plugin.api.errors import WrongOrderError
from spec_plugin.api.events import Drafts, EngineSchedule, LogprobBatch, StatedLogprobs, WeightSync
from spec_plugin.api.spans import Span
from spec_plugin.api.speculation import Reason
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession
from spec_plugin.trainer.harvest import DecoderHarvest
from spec_plugin.trainer.links import LocalLink
from spec_plugin.trainer.log_probs import Responses
from spec_plugin.trainer.spec_run import SpecRun

DOCUMENTS = [torch.tensor([1, 2, 3, 4]), torch.tensor([1, 5, 6, 7])]
MASK = torch.ones(2, 3, dtype=torch.bool)
STATED = torch.full((2, 3), -1.0)


class Harvest:
    """Writes down what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def open(self) -> None:
        self.calls.append("open")

    def close(self) -> None:
        self.calls.append("close")

    def deliver(self) -> None:
        self.calls.append("deliver")


class Seen:
    """A plugin that keeps what the guards are shown."""

    def __init__(self) -> None:
        self.syncs: list[WeightSync] = []
        self.batches: list[LogprobBatch | StatedLogprobs] = []

    @hookimpl
    def spec_weight_sync(self, event: WeightSync) -> None:
        self.syncs.append(event)

    @hookimpl
    def spec_check_logprobs(self, batch: LogprobBatch) -> None:
        self.batches.append(batch)

    @hookimpl
    def spec_check_stated(self, batch: StatedLogprobs) -> None:
        self.batches.append(batch)


class Engines(FakeLink):
    """Which say of the first document that its middle token was sampled without a draft."""

    said = (span_of([1], [2, 3, 4], 0, (2, 3)), span_of([1], [5, 6, 7], 0))

    async def spans(self) -> list[Span]:
        self.calls.append("spans")
        return list(self.said)


def make(overlaps: bool = False, link: Any = ...) -> tuple[SpecRun, Seen, Harvest]:
    seen, harvest = Seen(), Harvest()
    manager = create_manager(block=("eagle3", "provenance"), load_entry_points=False)
    manager.register(seen)
    session = SpecSession(SpecConfig(method="ngram", serve="always", self_test=False), TARGET, manager)
    link = Engines(Fault()) if link is ... else link
    return SpecRun(session, link, harvest=lambda _: harvest, overlaps=overlaps), seen, harvest


def synced(run: SpecRun, version: int = 0, **options: Any) -> None:
    weight = torch.ones(2, 2)
    asyncio.run(run.weights_synced(version, weight, weight, **options))


def responses(stated: torch.Tensor | None = STATED) -> Responses:
    return Responses(DOCUMENTS, [1, 1], MASK, stated, (torch.tensor([0, 0]), torch.tensor([0, 0])))


def test_a_step_in_its_order():
    run, seen, harvest = make()
    synced(run)
    with run.logprob_pass():
        assert harvest.calls == ["open"] and run.engines is not None and run.engines.running is None, (
            "the rollouts have ended"
        )
    assert harvest.calls == ["open", "close", "deliver"]
    run.check(responses(), STATED)
    run.policy_updated(1)
    assert run.metrics()["spec/failed"] == 0.0
    (batch,) = seen.batches
    assert isinstance(batch, LogprobBatch)
    assert batch.drafted.tolist() == [[Drafts.ON, Drafts.CONTROL, Drafts.ON], [Drafts.ON] * 3]
    assert (batch.policy_version, batch.lag_allowed, batch.versions.tolist()) == (0, False, [[0] * 3] * 2)


def test_law_3_what_overlaps_is_judged_by_the_version_of_each_token():
    run, seen, _ = make(overlaps=True)
    synced(run)
    run.check(responses(), STATED)
    (batch,) = seen.batches
    assert batch.lag_allowed and batch.versions.tolist() == [[0] * 3] * 2
    run.check_stated(responses())
    assert seen.batches[1].lag_allowed and seen.batches[1].versions.tolist() == [[0] * 3] * 2


def test_law_3_a_phase_without_drafts_is_said_to_be_one():
    run, seen, _ = make()
    synced(run)
    run.session.engines = EngineSchedule(run.session.plain_schedule)
    asyncio.run(run.rollouts_end())
    run.check(responses(), STATED)
    assert seen.batches[0].drafted.tolist() == [[Drafts.OFF] * 3] * 2


def test_law_3_of_what_overlaps_it_is_asked_whether_the_phases_that_sampled_it_drafted():
    run, seen, _ = make(overlaps=True)
    synced(run)
    for plain in ((1, 4), (1, 2)):
        run.link.said = tuple(span_of([1], d[1:], 0, plain) for d in ([1, 2, 3, 4], [1, 5, 6, 7]))  # type: ignore[union-attr]
        run._asked = False
        run.check(responses(), STATED)
    first, second = seen.batches
    assert first.drafted.tolist() == [[Drafts.OFF] * 3] * 2 and not first.speculating  # type: ignore[union-attr]
    assert second.drafted.tolist() == [[Drafts.CONTROL, Drafts.ON, Drafts.ON]] * 2


def test_law_3_where_a_synchronous_trainer_names_no_versions_the_engines_do_and_older_text_is_known_as_such():
    run, seen, _ = make()
    untold = replace(responses(), told=None)
    for version in range(2):
        synced(run, version)
        asyncio.run(run.rollouts_end())
        run.check(untold, STATED)
        run.policy_updated(version)
        run.link.said = ()  # type: ignore[union-attr]
    assert [batch.versions.tolist() for batch in seen.batches] == [[[0] * 3] * 2] * 2
    assert [(batch.policy_version, batch.lag_allowed) for batch in seen.batches] == [(0, False), (1, False)]


def test_law_3_log_probs_that_the_trainer_hides_are_those_that_the_engines_kept():
    run, seen, _ = make()
    run.link.said = (kept_of((1, 2, 3, 4), (-1.0, -1.0, -1.0)),)  # type: ignore[union-attr]
    synced(run)
    asyncio.run(run.rollouts_end())
    run.check(responses(None), STATED)
    hidden, known = seen.batches
    assert hidden.rollout is None and known.rollout is not None
    assert known.mask.tolist() == [[True] * 3]


@pytest.mark.parametrize(("current", "ahead"), [(False, 0), (True, 2)])
def test_weights_that_moved_since_the_last_sync_are_told_by_how_many_steps(current, ahead):
    run, seen, _ = make(overlaps=True)
    synced(run)
    for step in range(2):
        run.check(responses(), STATED, current_weights=current)
        run.policy_updated(step)
    run.check(responses(), STATED, current_weights=current)
    assert [b.ahead for b in seen.batches if isinstance(b, LogprobBatch)][-1] == ahead
    synced(run, 1)
    run.check(responses(), STATED, current_weights=current)
    assert seen.batches[-1].ahead == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("copied", [False, True])
def test_law_4_the_policys_own_tensors_are_copied(copied):
    run, seen, _ = make()
    weight = torch.ones(2, 2)
    asyncio.run(run.weights_synced(0, weight, None, copied=copied))
    weight += 1
    assert seen.syncs[0].embed is not None
    assert (seen.syncs[0].embed == 1).all() != copied and seen.syncs[0].lm_head is None


def test_the_engines_are_asked_once_a_step_for_what_they_sampled():
    run, _, _ = make()
    synced(run)
    asyncio.run(run.rollouts_end())
    run.check_stated(responses())
    assert run.undrafted(responses()).tolist() == [[False, True, False], [False] * 3]
    run.check(responses(), STATED)
    assert run.link.calls.count("spans") == 1  # type: ignore[union-attr]
    run.policy_updated(1)
    run.check(responses(), STATED)
    assert run.link.calls.count("spans") == 1, "what it sampled in this phase is known"  # type: ignore[union-attr]
    synced(run, 1)
    asyncio.run(run.rollouts_end())
    run.check(responses(), STATED)
    assert run.link.calls.count("spans") == 2  # type: ignore[union-attr]


def test_engines_whose_requests_overlap_are_asked_in_each_step():
    run, _, _ = make(overlaps=True)
    synced(run)
    for step in range(3):
        run.check(responses(), STATED)
        run.policy_updated(step)
    assert run.link.calls.count("spans") == 3  # type: ignore[union-attr]


def test_law_6_where_the_actor_has_not_heard_of_the_version_the_engines_word_stops_nothing():
    """separate_async, when servers did not say in time that they had the weights."""
    run, seen, _ = make(overlaps=True)
    synced(run, -1)
    run.check(replace(responses(), told=None), STATED)
    (batch,) = seen.batches
    assert batch.versions.tolist() == [[-1] * 3] * 2


def test_law_3_the_control_group_of_a_phase_whose_draft_failed_behind_it_is_asked_for():
    run, seen, _ = make()
    synced(run)
    asyncio.run(run.rollouts_end())
    run.session.fail(Reason.HARVEST, "planted")
    run.check(responses(), STATED)
    assert (seen.batches[0].drafted == Drafts.CONTROL).any()


def test_a_rank_without_responses_takes_part_in_what_is_collective_and_checks_nothing():
    run, seen, _ = make()
    synced(run)
    asyncio.run(run.rollouts_end())
    none = torch.zeros(0, 0)
    run.check(Responses([], [], none.bool(), none, (torch.zeros(0).long(),) * 2), none)
    run.policy_updated(0)
    assert not seen.batches and run.link.calls.count("spans") == 1  # type: ignore[union-attr]


def test_a_rank_without_a_link_has_nothing_to_report():
    run, _, _ = make(link=None)
    synced(run)
    assert run.metrics() == {}


def in_a_pass(run: SpecRun, call: Callable[[], Any]) -> None:
    with run.logprob_pass():
        call()


def unchecked(run: SpecRun) -> None:
    synced(run)
    run.policy_updated(0)


def checked_for_the_step_before(run: SpecRun) -> None:
    synced(run)
    asyncio.run(run.rollouts_end())
    run.check(responses(), STATED)
    run.policy_updated(0)
    run.policy_updated(1)


def checked_while_it_rolls_out(run: SpecRun) -> None:
    synced(run)
    run.check(responses(), STATED)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda run: asyncio.run(run.rollouts_begin()), "rollouts_begin was called before the first weights_synced"),
        (lambda run: in_a_pass(run, lambda: in_a_pass(run, lambda: None)), "logprob_pass was called inside another"),
        (lambda run: in_a_pass(run, lambda: synced(run)), "weights_synced was called inside logprob_pass"),
        (unchecked, "policy_updated was called without check"),
        (checked_for_the_step_before, "policy_updated was called without check"),
        (checked_while_it_rolls_out, "check was called while the rollouts run"),
    ],
)
def test_a_wrong_order_is_refused_with_a_sentence(wrong, says):
    run, _, _ = make()
    with pytest.raises(WrongOrderError, match=says):
        wrong(run)


@pytest.mark.parametrize("check", ["check", "check_stated"])
def test_law_3_what_the_guard_refuses_is_not_passed_for_checked(check):
    run, _, _ = make()
    synced(run)
    asyncio.run(run.rollouts_end())

    def refuses(*_: Any) -> None:
        raise LogprobProvenanceError("planted")

    run.session.check_logprobs = run.session.check_stated = refuses  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(LogprobProvenanceError):
            getattr(run, check)(responses(), *([STATED] if check == "check" else []))
    with pytest.raises(WrongOrderError):
        run.policy_updated(0)


def test_a_pass_that_fails_is_over_and_delivers_nothing():
    run, _, harvest = make()
    synced(run)
    with pytest.raises(ValueError, match="planted"), run.logprob_pass():
        raise ValueError("planted")
    assert harvest.calls == ["open", "close"]
    in_a_pass(run, lambda: None)


def test_law_6_spans_that_cannot_be_read_cost_speculation_only():
    run, seen, _ = make()
    synced(run)
    asyncio.run(run.rollouts_end())
    run._spans, run._asked = object(), True  # type: ignore[assignment]
    run.check(responses(), STATED)
    assert run.session.failed and (seen.batches[0].drafted == Drafts.ON).all()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_engines_of_this_process_are_called_on_their_own_loop(elsewhere):
    import threading

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    where: list[bool] = []

    class Engine:
        async def spec_set_schedule(self, schedule: Any) -> EngineSchedule:
            where.append(asyncio.get_running_loop() is loop)
            return EngineSchedule()

    link = LocalLink([Engine(), Engine()], 5.0, loop if elsewhere else None)
    asyncio.run(link.set_schedule(None))  # type: ignore[arg-type]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    assert where == [elsewhere] * 2


def test_law_3_what_engines_said_before_a_sync_is_not_what_they_say_behind_it():
    """Where rollouts overlap training new text may have come; and a text that comes again is of another version."""
    run, _, _ = make(overlaps=True)
    for version in range(2):
        synced(run, version)
        run.check(responses(), STATED)
        run.check(responses(), STATED)
    assert run.link.calls.count("spans") == 2


class Policy(nn.Module):
    """Whose states are the token ids that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity() for _ in range(LAYERS)])
        self.norm = nn.Identity()

    def forward(self, documents: list[torch.Tensor]) -> None:
        states = torch.stack(documents)[..., None].float().repeat(1, 1, 4)
        for layer in self.layers:
            states = layer(states)
        self.norm(states)


def evidence_run(overlaps: bool = False) -> tuple[SpecRun, Seen, Policy]:
    seen, policy = Seen(), Policy()
    manager = create_manager(block=("provenance", "trainer"), load_entry_points=False)
    manager.register(seen)
    session = SpecSession(SpecConfig(serve="always", self_test=False), TARGET, manager)
    return (
        SpecRun(session, Engines(Fault()), lambda run: DecoderHarvest(run, lambda: policy), overlaps=overlaps),
        seen,
        policy,
    )  # type: ignore[arg-type, return-value]


def evidence_step(run: SpecRun, policy: Policy, version: int, stated: torch.Tensor | None = STATED) -> None:
    synced(run, version)
    masks = [torch.arange(4) > 0] * 2
    with run.logprob_pass(lambda: (DOCUMENTS, masks)):
        policy(DOCUMENTS)
    told = torch.full((2,), version)
    run.check(replace(responses(stated), told=(told, told)), STATED)


def test_law_2_the_states_of_chosen_tokens_come_with_the_batch_that_has_their_log_probs():
    run, seen, policy = evidence_run()
    for version in range(2):
        evidence_step(run, policy, version)
        run.policy_updated(version)
    first, second = (batch.states for batch in seen.batches if isinstance(batch, LogprobBatch))
    assert first is not None and first.passed == 6 and not first.chosen
    assert second is not None and (second.passed, second.chosen, len(second.rows)) == (6, 4, 4)
    assert second.tokens.tolist() == [3, 4, 6, 7] and second.last[:, 0].tolist() == [2, 3, 5, 6]


def test_law_2_no_states_come_from_weights_that_have_moved_from_a_lagging_run_or_without_stated_log_probs():
    run, seen, policy = evidence_run()
    evidence_step(run, policy, 0)
    run.policy_updated(0)
    with run.logprob_pass(lambda: (DOCUMENTS, [torch.arange(4) > 0] * 2)):
        policy(DOCUMENTS)
    run.check(responses(), STATED, current_weights=True)
    lagging, heard, other = evidence_run(overlaps=True)
    hidden, unheard, third = evidence_run()
    for version in range(2):
        evidence_step(lagging, other, version)
        evidence_step(hidden, third, version, stated=None)
    found = [*seen.batches[1:], *heard.batches, *unheard.batches]
    assert len(found) >= 4 and all(batch.states is None for batch in found if isinstance(batch, LogprobBatch))
    whys = [batch.no_states for batch in (seen.batches[-1], heard.batches[-1], unheard.batches[-1])]
    assert not whys[0] and "overlap" in whys[1] and "log-probs" in whys[2]
