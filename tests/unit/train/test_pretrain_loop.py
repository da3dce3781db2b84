from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from spec_plugin_conformance.tiny import make_target

from draft_training import digest, load_draft
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.commands.train import PretrainSettings, loop, run
from spec_plugin.commands.train.texts import TokenizedRollout
from spec_plugin.lifecycle.manager import built_in_method

STEPS = 40


class Killed(Exception):
    pass


def rollouts(count: int) -> list[TokenizedRollout]:
    """What the tiny policy says: the current token + 37."""
    stream = random.Random(0)
    out = []
    for _ in range(count):
        first = stream.randrange(320)
        row = [(first + 37 * i) % 320 for i in range(24)]
        out.append(TokenizedRollout(tuple(row[:4]), tuple(row[4 : 16 + stream.randrange(8)])))
    return out


def trained(folder: Path, target: Path, *, killed_after: int | None = None, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.mkdir(exist_ok=True)
    info = TargetInfo(path=str(target), hf_config=json.loads((target / "config.json").read_text()), dtype="float32")
    settings = PretrainSettings(target, folder / "out", steps=STEPS, k=4, train_tokens=256)
    given = loop._HiddenStateSource.give
    visits = []

    def give(self: object, buffer: object, visit: int) -> None:
        visits.append(visit)
        if killed_after is not None and visit == killed_after:
            raise Killed
        given(self, buffer, visit)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_SAVE_EVERY", 0.0)
        patch.setattr(loop._HiddenStateSource, "give", give)
        method = built_in_method(SpecConfig.parse({}), info)
        found = rollouts(80)
        chances = loop.train(settings, info, method, found[16:], found[:16], folder, show=False)
    assert len(chances) <= 4 and chances[0] > 0.5, "the held-out rollouts say the same"
    return digest(load_draft(folder / "draft")[1])


def test_a_killed_training_goes_on_to_the_very_same_draft(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    target = make_target(tmp_path / "target")
    whole = trained(tmp_path / "whole", target, monkeypatch=monkeypatch)
    with pytest.raises(Killed):
        trained(tmp_path / "halves", target, killed_after=3, monkeypatch=monkeypatch)
    assert trained(tmp_path / "halves", target, monkeypatch=monkeypatch) == whole


def test_no_prompt_that_is_measured_on_is_trained_on() -> None:
    given = list({r.prompt: r for r in rollouts(40)}.values())[:30]
    again = [TokenizedRollout(r.prompt, (*r.response, 7)) for r in given]  # as with more --responses than prompts
    held_out, training = run._split([*given, *again, *given[:4]])
    assert held_out == [*given[:3], *again[:3], *given[:3]], "each prompt in turn: few prompts are measured on often"
    assert training == [*given[3:], *again[3:], given[3]]


def test_no_more_is_held_out_than_asked_for(monkeypatch) -> None:
    monkeypatch.setattr(run, "_HELD_OUT", 4)
    given = list({r.prompt: r for r in rollouts(40)}.values())[:30]
    held_out, training = run._split([*given, *given])
    assert held_out == [*given[:3], given[0]] and len(training) == 54


def test_rollouts_of_one_prompt_alone_are_refused() -> None:
    one = rollouts(1)[0]
    with pytest.raises(SpecConfigError, match="all rollouts answer one prompt"):
        run._split([one, TokenizedRollout(one.prompt, one.response[:3])])
