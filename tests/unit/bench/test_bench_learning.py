"""learning.py's parts that need no engine: what is served, what follows from the numbers, and the text before the run."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
import torch
from builders.bench import HF
from spec_plugin_conformance.tiny import byte_tokenizer

from draft_training import Document, DraftConfig, DraftTrainer, TrainSettings
from examples.bench import learning, starts
from examples.bench.common import spread
from examples.bench.comparison import ARMS, Arm, Replay, Served, conclusions, to_serve
from examples.bench.learning_report import report, write_picture
from examples.bench.recorded import Step
from examples.bench.subjects import Subject

OPTIONS = learning.Options(2, (0, 2), (1, 3), "strings", 4, 2, 1, 8, 48, 0, 1)


def replays(lengths: dict[str, list[float]]) -> list[Replay]:
    """Arm -> acceptance length at k=3 step by step; arms that are not named are untrained drafts."""
    steps = range(len(next(iter(lengths.values()))))
    table = {arm.name: lengths.get(arm.name, [1.0 for _ in steps]) for arm in ARMS}
    return [Replay("p", arm, step, {3: table[arm][step]}, ()) for arm in table for step in steps]


def served(arm: str, step: int, **speed: float) -> Served:
    ratios = {name if name == "controller" else f"k={name[1:]}": spread([x]) for name, x in speed.items()}
    return Served("p", arm, step, spread([100.0]), ratios, {name: 2.0 for name in ratios}, ["3/3/3"])


def sentence(found: list[str], words: str) -> str:
    (one,) = [s for s in found if words in s]
    return one


def test_before_the_first_step_an_online_arm_is_the_frozen_one_and_the_untrained_draft_is_served_once() -> None:
    first, later = to_serve(0, first=0), to_serve(4, first=0)
    assert [arm.name for arm in first] == ["newborn, frozen", "other, frozen", "own, frozen"]
    assert {arm for alike in first.values() for arm in alike} == set(ARMS)
    assert Arm("newborn", False) not in later and len(later) == 5
    assert len(to_serve(4, first=4)) == 6


def test_the_expected_order_holds_where_the_numbers_have_it() -> None:
    found = conclusions(
        "p",
        replays(
            {
                "other, frozen": [2.0, 1.8],
                "other, online": [2.0, 2.4],
                "own, frozen": [3.0, 2.9],
                "own, online": [3.0, 3.2],
                "newborn, online": [1.0, 2.2],
            }
        ),
        [],
    )
    own, other = sentence(found, "own beats other"), sentence(found, "other beats newborn")
    assert own.count("holds, ahead at 2 of 2 steps") == other.count("holds, ahead at 2 of 2 steps") == 2
    assert "step 1: 3.20 against 2.40" in own
    assert "adds most to newborn: newborn +1.20, other +0.60, own +0.30" in sentence(found, "Online training")
    assert "own decays: 3.00 at step 0, 2.90 at step 1; online 3.00, 3.20" in sentence(found, "of own")


def test_where_the_order_fails_the_steps_are_named_and_small_differences_are_none() -> None:
    found = conclusions(
        "p",
        replays(
            {
                "own, frozen": [2.0, 2.04, 2.0],
                "other, frozen": [2.3, 2.0, 1.5],
                "other, online": [2.3, 2.0, 1.4],
                "newborn, online": [1.0, 2.5, 2.0],
                "own, online": [2.0, 2.0, 2.03],
            }
        ),
        [],
    )
    own = sentence(found, "own beats other")
    assert "Frozen: fails, ahead at 1 of 3 steps, even at step 1, behind at step 0" in own
    assert "Online: fails, ahead at 1 of 3 steps, behind at step 1, 2" in sentence(found, "other beats newborn")
    assert "It hurts other. No change for own." in sentence(found, "Online training")
    assert "does not decay:" in sentence(found, "of own") and "other decays" in sentence(found, "of other")


def test_more_drafted_tokens_are_compared_with_three_and_the_controller_with_the_best_in_hindsight() -> None:
    cells = [
        served("own, frozen", 0, k1=1.2, k3=1.5, k5=1.2, k7=1.0, controller=1.5),
        served("own, online", 0, k1=9.0, k3=9.0, k5=9.0, k7=9.0, controller=9.0),  # stands for the run above
        served("own, online", 2, k1=1.2, k3=1.5, k5=1.7, k7=1.2, controller=1.6),
        served("newborn, frozen", 0, k1=0.8, k3=0.5, k5=0.4, k7=0.3, controller=0.95),
    ]
    found = conclusions("p", replays({"own, online": [1.0]}), cells)
    assert "k=5 does not lose against k=3 everywhere: slower in 1, faster in 1 of 2" in sentence(found, "k=5 ")
    assert "faster: own, online at step 2" in sentence(found, "k=5 ")
    assert "k=7 loses against k=3 everywhere: slower in 2" in sentence(found, "k=7 ")
    assert "engine of step 2 the fastest is own, online with k=5: 1.70x" in sentence(found, "step 2 the fastest")
    controller = sentence(found, "The controller")
    assert "at worst 0.94 (own, online at step 2)" in controller
    assert "no drafts at worst 0.95 (newborn, frozen" in controller


def test_where_nothing_is_faster_than_no_drafts_it_is_said() -> None:
    cells = [served("own, frozen", 0, k1=0.9, k3=0.8, k5=0.7, k7=0.6, controller=1.0)]
    assert "no draft is faster than none" in sentence(
        conclusions("p", replays({"own, online": [1.0]}), cells), "engine of step 0"
    )


def test_table_and_picture_take_steps_that_are_not_served(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells = [served("own, frozen", 1, k3=1.2, controller=1.1)]
    found = replays({"own, online": [1.0, 2.0]})
    for some in (cells, []):
        report("p", found, some, (3,))
        write_picture(found, some, (3,), tmp_path / "p.png")
        assert (tmp_path / "p.png").stat().st_size > 10_000


def test_a_policy_is_named_by_task_width_and_temperature() -> None:
    hard = learning.Policy.parse("sort-96@1.4")
    assert (hard.subject, hard.temperature, hard.name) == (Subject("sort", 96), 1.4, "sort-96 at temperature 1.4")
    assert learning.Policy.parse("add-128").name == "add-128"
    for wrong in ("add", "mul-96", "add-100", "sort-96@hot"):
        with pytest.raises(click.BadParameter, match=r"wanted is|no number"):
            learning.Policy.parse(wrong)


def documents(version: int) -> list[Document]:
    generator = torch.Generator().manual_seed(version)
    made = []
    for _ in range(4):
        states = torch.randn(24, 64, generator=generator)
        ids = torch.randint(32, (24,), generator=generator)
        mask = torch.arange(24) > 4
        made.append(Document(ids, states[:, :48], states[:, 48:], mask, policy_version=version))
    return made


def test_a_draft_is_judged_before_it_trains_and_a_frozen_one_never_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "FIRST", 2 * starts.TOKENS)
    monkeypatch.setattr(learning, "LATER", starts.TOKENS)
    config = DraftConfig.from_target(HF)
    weights = torch.randn(32, 16, generator=torch.Generator().manual_seed(9))
    steps = [Step(documents(i), weights, weights) for i in range(3)]
    start = DraftTrainer(config, TrainSettings(), device="cpu", seed=3).engine_tensors()
    changed = {}
    for arm, given in ((ARMS[0], None), (ARMS[1], None), (ARMS[4], start), (ARMS[5], start)):
        along = list(learning.learn(config, steps, arm, given, OPTIONS))
        assert [replay.step for replay, _ in along] == [0, 1, 2]
        assert along[0][0].promised == () and set(along[0][0].lengths) == {1, 3}
        drafts = [tensors["fc.weight"] for _, tensors in along]
        changed[arm.name] = [not torch.equal(drafts[0], d) for d in drafts]
        if given is not None:
            assert torch.equal(drafts[0], start["fc.weight"])
    assert changed == {a.name: [False, a.online, a.online] for a in (ARMS[0], ARMS[1], ARMS[4], ARMS[5])}


@pytest.mark.parametrize(("task", "asks"), [("add", "abcdefghijklmnopqrstuvwxyz"), ("sort", "0123456789+=")])
def test_text_of_the_other_task_is_of_the_other_alphabet(task: str, asks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer(320, ("<|im_end|>", "<|pad|>"))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    monkeypatch.setattr(Subject, "policy", lambda self: Path("nowhere"))
    monkeypatch.setattr(starts.AutoTokenizer, "from_pretrained", lambda path: tokenizer)
    subject = Subject(task, 96)  # type: ignore[arg-type]
    rows = starts.other_task(subject, 5, seed=1)
    assert len(rows) == 5 and rows == starts.other_task(subject, 5, seed=1) != starts.other_task(subject, 5, seed=2)
    assert all(set(tokenizer.decode(prompt)) <= set(asks) for prompt, _ in rows)
    own = starts.plain_strings(subject, 5, seed=1)
    assert all(set(tokenizer.decode(prompt)) <= set(starts.ALPHABETS[task]) for prompt in own)
