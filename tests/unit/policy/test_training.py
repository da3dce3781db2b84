"""The draft trainer behind its hooks, on tiny tensors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.training import HF, TARGET, V, hidden, plugin, sync

from draft_training import DraftTrainer, HiddenBuffer, TrainSettings, fingerprint
from spec_plugin import SpecConfig, SpecConfigError, SpecPluginError
from spec_plugin.api.events import TargetInfo, WeightSync
from spec_plugin.methods.eagle3 import Eagle3Method
from spec_plugin.policy.online_training import DraftTraining


def test_a_draft_is_born_trained_and_offered_at_the_next_sync() -> None:
    p = plugin(train_max_steps=3)
    p.spec_weight_sync(event=sync(0))
    born = p.spec_draft_weights(event=sync(0))
    p.spec_target_forward(hidden=hidden(torch.arange(40) % V))
    p.spec_train_draft(step=1, seconds=30.0)
    p.spec_weight_sync(event=sync(1))
    trained = p.spec_draft_weights(event=sync(1))
    assert born is not None and trained is not None
    assert (born.draft_version, trained.draft_version) == (0, 3)
    assert born.expected_chances == trained.expected_chances == (), "two documents in all: none to hold back"
    p.spec_target_forward(hidden=hidden(torch.arange(40) % V, 1))
    p.spec_train_draft(step=2, seconds=30.0)
    again = p.spec_draft_weights(event=sync(1))
    assert again is not None and again.expected_chances
    assert trained.digest == fingerprint(trained.tensors) != born.digest
    assert p.spec_metrics()[0]["spec/train_steps"] == 3


def test_a_newborn_draft_is_judged_at_once_on_text_that_was_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    p = plugin(train_max_steps=2)
    p.spec_weight_sync(event=sync(0))
    seen: list[int] = []
    train, evaluate = DraftTrainer.train_slice, DraftTrainer.evaluate

    def trained(self: DraftTrainer, buffer: HiddenBuffer, *rest: Any) -> Any:
        seen.append(sum(map(len, buffer.sample(1 << 20, 0.0))))
        return train(self, buffer, *rest)

    def judged(self: DraftTrainer, documents: Any, *rest: Any) -> Any:
        seen.append(sum(map(len, documents())))
        return evaluate(self, documents, *rest)

    monkeypatch.setattr(DraftTrainer, "train_slice", trained)
    monkeypatch.setattr(DraftTrainer, "evaluate", judged)
    for _ in range(8):
        p.spec_target_forward(hidden=hidden(torch.arange(40) % V))
    p.spec_train_draft(step=1, seconds=30.0)
    assert len(seen) == 2 and 220 <= seen[0] <= 280 and seen[1] == 40, (
        "an eighth is held back from the first slice, and the draft is judged on it after that"
    )
    assert p.spec_draft_weights(event=sync(1)).expected_chances
    p.spec_train_draft(step=2, seconds=30.0)
    assert seen[2:] == [320, 320], "from then on what is new is unseen: judged first, all of it trained on"


def test_a_draft_that_was_given_and_knows_nothing_begins_like_a_newborn_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SpecConfig(train_max_steps=1)
    method = Eagle3Method().spec_method(config, TARGET)
    assert method is not None and method.draft is not None
    random = DraftTrainer(method.draft.config, TrainSettings(), device="cpu", seed=5).engine_tensors()
    p = DraftTraining()
    given = dataclasses.replace(method, draft=dataclasses.replace(method.draft, tensors=random), pretrained=True)
    p.spec_configure(config, TARGET, given)
    for _ in p.spec_weight_sync(sync(0)):
        pass
    assert not p._trainer.schedule.newborn, "what was given is taken for trained"
    for _ in range(8):
        p.spec_target_forward(hidden=hidden(torch.arange(40) % V))
    seen: list[int] = []
    train = DraftTrainer.train_slice
    monkeypatch.setattr(
        DraftTrainer, "train_slice", lambda self, b, *rest: seen.append(len(b)) or train(self, b, *rest)
    )
    p._train(30.0)
    assert p._trainer.schedule.newborn and seen == [14], "an eighth is held back to judge it"


def test_what_the_target_owns_is_never_offered() -> None:
    p = plugin()
    p.spec_weight_sync(event=sync())
    refresh = p.spec_draft_weights(event=sync())
    assert refresh is not None
    assert not [name for name in refresh.tensors if "embed" in name or "lm_head" in name]


def test_a_new_pruned_draft_takes_the_tokens_that_the_policy_uses() -> None:
    p = plugin(draft_vocab_size=32, train_max_steps=1)
    p.spec_weight_sync(event=sync())
    used = torch.tensor([90, 91, 92, 93] * 10)
    p.spec_target_forward(hidden=hidden(used))
    p.spec_train_draft(step=1, seconds=30.0)
    event = sync(1)
    p.spec_weight_sync(event=event)
    refresh = p.spec_draft_weights(event=event)
    assert refresh is not None
    ids = torch.arange(32) + refresh.tensors["d2t"]
    assert {90, 91, 92, 93} <= set(ids.tolist())
    assert event.lm_head is not None
    assert torch.equal(refresh.tensors["lm_head.weight"], event.lm_head[ids])


def test_the_vocabulary_of_a_pruned_draft_follows_the_text_and_resumes_as_it_was(tmp_path: Path) -> None:
    p = plugin(draft_vocab_size=32, train_max_steps=1, buffer_tokens=1024)

    def vocabulary(run: DraftTraining, version: int) -> set[int]:
        run.spec_weight_sync(event=sync(version))
        refresh = run.spec_draft_weights(event=sync(version))
        assert refresh is not None
        return set((torch.arange(32) + refresh.tensors["d2t"]).tolist())

    p.spec_weight_sync(event=sync())
    for step, first in enumerate((90, 60)):  # other tokens, until the first ones have left the buffer
        for _ in range(40):
            p.spec_target_forward(hidden=hidden(torch.arange(first, first + 4).repeat(10), step))
        p.spec_train_draft(step=step + 1, seconds=30.0)
        assert set(range(first, first + 4)) <= vocabulary(p, step + 1)
    p.spec_save(path=tmp_path)
    resumed = plugin(draft_vocab_size=32, train_max_steps=1)
    resumed.spec_load(path=tmp_path)
    assert vocabulary(resumed, 2) == vocabulary(p, 2)


@pytest.mark.parametrize("torn", [False, True], ids=["saved", "killed between two renames"])
def test_a_resumed_run_continues_the_saved_draft(tmp_path: Path, torn: bool) -> None:
    p = plugin(train_max_steps=2)
    p.spec_weight_sync(event=sync())
    for _ in range(9):
        p.spec_target_forward(hidden=hidden(torch.arange(40)))
    p.spec_train_draft(step=1, seconds=300.0)
    p.spec_save(path=tmp_path)
    if torn:  # the old draft was set aside, and the new one not yet put in its place
        (tmp_path / "draft").rename(tmp_path / ".draft.previous")
    resumed = plugin()
    resumed.spec_load(path=tmp_path)
    resumed.spec_weight_sync(event=sync())
    old, new = p.spec_draft_weights(event=sync()), resumed.spec_draft_weights(event=sync())
    assert old is not None and new is not None
    assert (new.draft_version, new.digest) == (2, old.digest)
    assert len(old.expected_chances) > 0 and new.expected_chances == old.expected_chances, "so that it is tried at once"


def test_a_checkpoint_without_a_draft_starts_a_new_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    p = plugin()
    p.spec_load(path=tmp_path)
    assert "holds no draft, since the run was saved without one" in caplog.text
    p.spec_weight_sync(event=sync())
    refresh = p.spec_draft_weights(event=sync())
    assert refresh is not None and refresh.draft_version == 0


def test_a_sync_without_the_policys_embedding_is_named() -> None:
    with pytest.raises(SpecPluginError, match=r"embed_tokens\.weight"):
        plugin().spec_weight_sync(event=WeightSync(0, None, None))


@pytest.mark.parametrize(
    ("options", "hf", "says"),
    [
        ({}, {"model_type": "mixtral"}, "MixtralForCausalLM"),
        ({"aux_layers": (1, 2, 9)}, {}, "9"),
        ({"draft": "/does/not/exist"}, {}, "/does/not/exist"),
    ],
)
def test_a_draft_that_cannot_work_is_refused_before_the_engine_starts(
    options: dict[str, object], hf: dict[str, object], says: str
) -> None:
    target = TargetInfo(path="/nowhere", hf_config={**HF, **hf}, dtype="float32")
    with pytest.raises(SpecConfigError, match=says):
        Eagle3Method().spec_method(SpecConfig(**options), target)  # type: ignore[arg-type]
