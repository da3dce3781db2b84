"""OpenRLHF's checkpoints: whenever a run is killed, the draft that belongs to the latest one is found."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from spec_plugin_openrlhf.checkpoints import latest, move_in, waiting


class Killed(Exception):
    """Where the run is killed."""


def theirs(checkpoints: Path, tag: str) -> None:
    """As DeepSpeed does: the checkpoint, then its name."""
    (checkpoints / "_actor" / tag).mkdir(parents=True, exist_ok=True)
    (checkpoints / "_actor" / "latest").write_text(tag)


def save(checkpoints: Path, tag: str, draft: str, killed: str = "") -> None:
    """As the adapter does."""
    ours = waiting(checkpoints, tag)
    ours.mkdir(parents=True)
    (ours / "draft").write_text(draft)
    for name, step in {"before": lambda: theirs(checkpoints, tag), "behind": lambda: move_in(checkpoints, tag)}.items():
        if killed == name:
            raise Killed
        step()


def found(checkpoints: Path) -> str:
    return (latest(checkpoints) / "draft").read_text()


def test_it_lies_within_the_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, "global_step3", "3")
    assert latest(tmp_path) == tmp_path / "_actor/global_step3/spec_plugin" and found(tmp_path) == "3"
    assert [folder.name for folder in tmp_path.iterdir()] == ["_actor"], "and nothing beside"


@pytest.mark.parametrize(("killed", "draft"), [("before", "2"), ("behind", "3")])
def test_a_run_that_was_killed_while_it_saved_resumes_with_the_draft_of_the_latest_checkpoint(
    tmp_path: Path, killed: str, draft: str
) -> None:
    save(tmp_path, "global_step2", "2")
    with pytest.raises(Killed):
        save(tmp_path, "global_step3", "3", killed)
    assert found(tmp_path) == draft
    save(tmp_path, "global_step3", "3 again")
    assert found(tmp_path) == "3 again" and not (tmp_path / "_spec_plugin").exists(), "the next save clears up"


@pytest.mark.parametrize("killed", ["", "behind"])
def test_the_same_step_again_after_the_run_went_back(tmp_path: Path, killed: str) -> None:
    save(tmp_path, "global_step2", "2")
    save(tmp_path, "global_step3", "of the first time")
    (tmp_path / "_actor" / "latest").write_text("global_step2")
    with contextlib.suppress(Killed):
        save(tmp_path, "global_step3", "of the second", killed)
    assert found(tmp_path) == "of the second"


def test_where_openrlhf_makes_no_checkpoint_nothing_stays(tmp_path: Path) -> None:
    waiting(tmp_path, "global_step2").mkdir(parents=True)
    move_in(tmp_path, "global_step2")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_without_ours_has_a_name_all_the_same(tmp_path: Path) -> None:
    theirs(tmp_path, "global_step5")
    assert latest(tmp_path) == tmp_path / "_actor/global_step5/spec_plugin" and not latest(tmp_path).exists()
