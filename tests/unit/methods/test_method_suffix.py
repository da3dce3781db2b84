"""Suffix decoding: what is refused, what the trainer remembers and saves, and the trees of the engine."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spec_plugin import SpecConfig, SpecConfigError
from spec_plugin.api.events import RolloutStats, TargetInfo
from spec_plugin.api.method import Method
from spec_plugin.api.rollouts import Rollout
from spec_plugin.engine.lossless import check_speculative_config
from spec_plugin.methods import suffix
from spec_plugin.methods.suffix import SuffixMethod
from spec_plugin.policy.break_even.controller import BreakEvenController

TARGET = TargetInfo("m", {"vocab_size": 64}, "float32", max_num_seqs=16)
needs_package = pytest.mark.skipif(
    importlib.util.find_spec(suffix.PACKAGE) is None, reason=f"needs the package with the trees: {suffix.INSTALL}"
)


def ids(*tokens: int) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


def method(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Method:
    monkeypatch.setattr(suffix.importlib.util, "find_spec", lambda name: object())
    found = SuffixMethod().spec_method(SpecConfig.parse({"method": "suffix", **options}), TARGET)
    assert found is not None
    return found


def plugin(**options: Any) -> SuffixMethod:
    made = SuffixMethod()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix.importlib.util, "find_spec", lambda name: object())
        made.spec_method(SpecConfig.parse({"method": "suffix", **options}), TARGET)
    return made


def test_what_the_engine_is_told_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = method(monkeypatch, k=6, memory_tokens=2048)
    check_speculative_config(found.speculative_config())
    assert (
        found.pretrained
        and found.variable_length
        and found.memory is not None
        and found.harvest is None
        and found.draft is None
    )
    assert found.worker_settings()["proposer_options"] == {"most_tokens": 2048}


def test_without_the_package_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SpecConfigError, match="arctic-inference: pip install"):
        SuffixMethod().spec_method(SpecConfig.parse({"method": "suffix"}), TARGET)


@pytest.mark.parametrize(("name", "value"), [("draft", "d"), ("draft_vocab_size", 64), ("aux_layers", (1, 2, 3))])
def test_options_of_a_draft_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    with pytest.raises(SpecConfigError, match=rf"spec\.{name}.*suffix.* has no draft model"):
        method(monkeypatch, **{name: value})


def test_what_was_sampled_comes_back_from_a_checkpoint(tmp_path: Path) -> None:
    before = plugin()
    assert before.recall() == [] and before.spec_metrics() == {}
    before.spec_save(tmp_path / "early")
    assert not (tmp_path / "early").exists(), "nothing was sampled yet"
    first = [Rollout(ids(1, 2, 3), ids(4, 5)), Rollout(ids(7), ids()), Rollout(ids(1, 2, 3), ids(6))]
    before.keep(first)
    before.keep([Rollout(ids(9), ids(9, 9))])
    before.spec_save(tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["rollouts.safetensors"]
    after = plugin()
    after.spec_load(tmp_path)
    assert after.recall() == before.recall() == [first[1], first[0], first[2], Rollout(ids(9), ids(9, 9))]
    assert after.spec_metrics() == before.spec_metrics() == {"spec/memory_tokens": 13.0}


@pytest.mark.parametrize("broken", ["cut", "text", "lengths"])
def test_a_broken_memory_is_lost_and_said_so(tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture) -> None:
    saved = plugin()
    saved.keep([Rollout(ids(1, 2), ids(3))])
    saved.spec_save(tmp_path)
    (file,) = tmp_path.iterdir()
    if broken == "cut":
        file.write_bytes(file.read_bytes()[:-3])
    elif broken == "text":
        file.write_text("no tensors")
    else:
        from safetensors.numpy import save_file

        lengths = np.array([[1, 7]], dtype=np.int64)
        save_file({"tokens": np.arange(3, dtype=np.int32), "lengths": lengths}, file)
    resumed = plugin()
    resumed.spec_load(tmp_path)
    assert resumed.recall() == []
    assert "cannot be read, so suffix begins without any" in caplog.text
    resumed.keep([Rollout(ids(1, 2), ids(3))])
    assert resumed.recall() == [Rollout(ids(1, 2), ids(3))]


def test_no_more_is_kept_than_asked() -> None:
    small = plugin(memory_tokens=1024)
    for phase in range(40):
        small.keep([Rollout(ids(phase), ids(*range(100)))])
    assert small.spec_metrics()["spec/memory_tokens"] == 10 * 101
    assert [r.prompt for r in small.recall()] == [ids(p) for p in range(10)]


def test_what_drafting_would_have_accepted_is_what_the_controller_expects() -> None:
    controller = BreakEvenController()
    controller.spec_configure(SpecConfig.parse({"method": "suffix"}), TARGET, Method("suffix", {}, pretrained=True))
    shadow = RolloutStats(0, 10, 400, 1.0, shadow_rounds=100, shadow_per_pos=(80, 60, 60))
    controller.spec_rollout_end(shadow)
    assert controller.acceptance_curve == (0.8, 0.75, 1.0, 0.0)
    few = RolloutStats(1, 10, 400, 1.0, shadow_rounds=10, shadow_per_pos=(1, 0, 0))
    controller.spec_rollout_end(few)
    assert controller.acceptance_curve == (0.8, 0.75, 1.0, 0.0), "ten rounds say nothing"


def trees(most: int = 10_000, width: int = 4) -> Any:
    from spec_plugin.engine.vllm.suffix.trees import PromptTrees

    return PromptTrees(depth=24, width=width, most_tokens=most)


def say(memory: Any, name: str, prompt: list[int], response: list[int], k: int) -> tuple[int, int]:
    """Sample a response by verifying drafts, as the engine does; (rounds, accepted)."""
    memory.start_request(name, np.array(prompt, dtype=np.int32))
    at, rounds, accepted = 1, 0, 0
    memory.add_active_response(name, response[:1])
    while at < len(response):
        context = np.array((prompt + response[:at])[-24:], dtype=np.int32)
        draft = memory.speculate(name, context, max_spec_tokens=k).token_ids
        assert len(draft) <= k
        right = 0
        while right < len(draft) and at + right < len(response) and draft[right] == response[at + right]:
            right += 1
        sampled = response[at : at + right + 1]
        memory.add_active_response(name, sampled)
        at, rounds, accepted = at + len(sampled), rounds + 1, accepted + right
    return rounds, accepted


@needs_package
def test_a_prompt_that_comes_back_is_drafted_from_what_was_said_to_it() -> None:
    rng, memory = random.Random(0), trees()
    prompts = [[rng.randrange(64) for _ in range(10)] for _ in range(8)]
    said = [[rng.randrange(64) for _ in range(40)] for _ in prompts]
    first = [say(memory, f"0-{i}", p, s, k=4) for i, (p, s) in enumerate(zip(prompts, said, strict=True))]
    taken = memory.take()
    assert [(r.prompt, r.response) for r in taken] == [(ids(*p), ids(*s)) for p, s in zip(prompts, said, strict=True)]
    assert memory.take() == []
    second = [say(memory, f"1-{i}", p, s, k=4) for i, (p, s) in enumerate(zip(prompts, said, strict=True))]
    assert sum(a for _, a in first) < 30 and sum(r for r, _ in second) <= 8 * 9, (first, second)


@needs_package
def test_other_engines_and_earlier_runs_are_as_good_as_its_own() -> None:
    prompt, response = list(range(10)), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]
    memory = trees()
    memory.remember([Rollout(ids(*prompt), ids(*response))])
    rounds, accepted = say(memory, "r", prompt, response, k=4)
    assert rounds == 4 and accepted == 12
    memory.take()
    memory.forget()
    assert say(memory, "r", prompt, response, k=4)[1] < 6, "forgotten"


@needs_package
@pytest.mark.parametrize("width", [1, 4])
def test_the_shadow_counts_what_real_rounds_accept(width: int) -> None:
    """With k = 0 the same text is walked through as it would have been with drafts: rounds and positions are the same."""
    rng = random.Random(5)
    prompts = [[rng.randrange(6) for _ in range(6)] for _ in range(6)]
    said = [[rng.randrange(6) for _ in range(50)] for _ in prompts]
    again = [[t if rng.random() < 0.8 else rng.randrange(6) for t in s] for s in said]
    found = []
    for k in (width, 0):
        memory = trees(width=width)
        memory.remember([Rollout(ids(*p), ids(*s)) for p, s in zip(prompts, said, strict=True)])
        rounds = accepted = 0
        for i, (p, s) in enumerate(zip(prompts, again, strict=True)):
            r, a = say(memory, str(i), p, s, k)
            rounds, accepted = rounds + r, accepted + a
        shadow_rounds, per_pos = memory.take_shadow()
        found.append((rounds, accepted) if k else (shadow_rounds, sum(per_pos)))
        assert k == 0 or shadow_rounds == 0
        assert memory.take_shadow() == (0, [0] * width)
    assert found[0] == found[1]


@needs_package
def test_memory_is_bounded_and_trees_go_with_their_last_rollout() -> None:
    memory, rng = trees(most=1000), random.Random(1)
    for phase in range(30):
        prompt = [rng.randrange(64) for _ in range(10)]
        say(memory, f"r{phase}", prompt, [rng.randrange(64) for _ in range(50)], k=4)
        memory.take()
        assert len(memory._trees) <= 17 and memory._latest.tokens <= 1000
        assert memory._shared_tokens <= 1000 / 16 + 50
        assert memory._shared.num_seqs() <= 2
    assert all(t.tree.num_seqs() == t.sequences == 1 for t in memory._trees.values())


@needs_package
def test_no_more_is_handed_on_than_is_kept() -> None:
    """A run whose speculation has failed takes nothing any more, and of a large group a few are enough."""
    memory = trees(most=300)
    for i in range(8):
        say(memory, f"a{i}", [1, 2, 3], [i] * 20, k=4)
        memory.stop_request(f"a{i}")
    assert len(memory._fresh) == 4
    for i in range(40):
        say(memory, f"b{i}", [i], [i] * 50, k=4)
        memory.stop_request(f"b{i}")
    assert sum(r.tokens for r in memory._fresh.values()) <= 300
    taken = memory.take()
    assert [r.response for r in taken[:4]] == [ids(*[i] * 20) for i in range(4, 8)], "the last to end"


@needs_package
def test_the_patch_refuses_a_proposer_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.spec_decode import suffix_decoding

    from spec_plugin.api.errors import PatchError
    from spec_plugin.engine.vllm.suffix.proposer import prepare

    class Another:
        def __init__(self, vllm_config: Any) -> None:
            self.tree = vllm_config

        def propose(self) -> None:
            del self.tree

    monkeypatch.setattr(suffix_decoding, "SuffixDecodingProposer", Another)
    with pytest.raises(PatchError, match="does not fit this vLLM"):
        prepare({})


@needs_package
def test_what_other_engines_sampled_is_of_the_phase_that_was_taken() -> None:
    """Of each prompt the last two phases are kept: all of both, whichever engine sampled it."""
    rng, memory, prompt = random.Random(0), trees(), list(range(10))
    for phase in range(2):
        say(memory, f"{phase}", prompt, [rng.randrange(64) for _ in range(8)], k=4)
        memory.take()
        memory.remember([Rollout(ids(*prompt), ids(*(rng.randrange(64) for _ in range(8))))])
    assert memory._trees[ids(*prompt)].sequences == 4


def one_by_one(memory: Any, rollouts: list[Rollout]) -> None:
    """As it was done: each rollout is put into the trees, and then makes room or is removed again."""
    for rollout in rollouts:
        number = memory._plant(rollout.prompt)
        response = np.frombuffer(rollout.response, dtype=np.int32).copy()
        memory._trees[rollout.prompt].tree.extend_ndarray(number, response)
        memory._shared.extend_ndarray(number, response)
        memory._keep(rollout, number, memory._phase - 1)


@needs_package
@pytest.mark.parametrize("most", [100_000, 3_000, 600])
def test_what_is_kept_and_drafted_is_the_same_as_if_each_had_been_put_in_and_removed(most: int) -> None:
    rng = random.Random(most)
    prompts = [[rng.randrange(8) for _ in range(10)] for _ in range(60)]
    said: list[tuple[bytes, bytes]] = []
    drafted: list[bool] = []

    def rollout() -> Rollout:
        made = Rollout(ids(*rng.choice(prompts)), ids(*(rng.randrange(1 << 30) for _ in range(rng.randrange(8, 60)))))
        said.append((made.prompt, made.response))
        return made

    memories = trees(most=most), trees(most=most)
    for phase in range(3):
        own, others = [rollout() for _ in range(6)], [rollout() for _ in range(40)]
        for memory, remember in zip(memories, (type(memories[0]).remember, one_by_one), strict=True):
            for i, r in enumerate(own):
                memory.start_request(f"{phase}-{i}", np.frombuffer(r.prompt, dtype=np.int32))
                memory.add_active_response(f"{phase}-{i}", np.frombuffer(r.response, dtype=np.int32).tolist())
                memory.stop_request(f"{phase}-{i}")
            memory.take()
            remember(memory, others)
    new, old = memories
    assert list(new._latest) == list(old._latest) and new._latest.tokens == old._latest.tokens <= most
    assert new._in_shared == old._in_shared and new._shared.num_seqs() == old._shared.num_seqs()
    assert {p: t.sequences for p, t in new._trees.items()} == {p: t.sequences for p, t in old._trees.items()}
    known = [prompt for prompt, _ in new._latest]
    for i, (prompt, response) in enumerate(
        said
    ):  # of what occurs once there is one continuation, whatever came before it
        found = []
        for memory in memories:
            memory.start_request(i, np.frombuffer(prompt, dtype=np.int32))
            found.append(memory.speculate(i, np.frombuffer(response, dtype=np.int32)[:6].copy(), 8, 4.0, 0.0).token_ids)
        assert found[0] == found[1]
        drafted.append(bool(found[0]))
    assert any(drafted) and all(drafted) == (most == 100_000) and set(known) <= {prompt for prompt, _ in said}


@needs_package
def test_what_is_not_kept_is_never_put_into_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token in a tree takes about a microsecond, and other engines may have sampled a hundred times of what is kept."""
    memory, planted = trees(most=1_000), []
    original = memory._new_tree

    class Counting:
        def __init__(self) -> None:
            self.tree = original()

        def extend_ndarray(self, number: int, tokens: Any) -> None:
            planted.append(len(tokens))
            self.tree.extend_ndarray(number, tokens)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.tree, name)

    monkeypatch.setattr(memory, "_new_tree", Counting)
    memory.forget()
    memory.remember(Rollout(ids(i, i + 1), ids(*range(98))) for i in range(1000))
    assert memory._latest.tokens == 1000 and sum(planted) <= 1000 + 1000 / 16


@needs_package
def test_what_is_left_over_of_a_phase_is_given_later_or_not_at_all() -> None:
    memory = trees()
    for i in range(6):
        say(memory, f"a{i}", [i], [i] * 9, k=4)
    taken = memory.take(25)
    assert [r.tokens for r in taken] == [10, 10]
    assert [r.prompt for r in memory.take(1, more=True)] == [ids(2)], "one that is longer alone"
    say(memory, "b", [7], [7] * 9, k=4)
    assert [r.prompt for r in memory.take()] == [ids(7)] and memory.take(more=True) == []
