"""The README.md beside a draft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders.training import hidden, plugin, sync

from spec_plugin.commands.train.run import _command
from spec_plugin.commands.train.settings import PretrainSettings
from spec_plugin.policy.model_card import ModelCard


def test_it_says_what_for_how_well_from_what_and_how_it_is_served(tmp_path):
    card = ModelCard("Qwen/Qwen3-8B", "eagle3", "900 rollouts", (0.8, 0.5), (0.75,), "spec-plugin train --out x")
    card.write(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("---\nbase_model: Qwen/Qwen3-8B\ntags: [speculative-decoding, eagle3, vllm]\n---\n")
    assert "| tokens a step | 1.80 | 2.20 |" in text and "| tokens a step | 1.75 |" in text
    assert "900 rollouts" in text and "    spec-plugin train --out x" in text
    assert '{"method": "eagle3", "model": ".", "num_speculative_tokens": 1}' in text
    assert [file.name for file in tmp_path.iterdir()] == ["README.md"]


def test_one_that_cannot_be_written_costs_a_line_and_no_draft(tmp_path, caplog):
    ModelCard("/data/\udcff\u6a21", "eagle3", "text").write(tmp_path)
    assert "# Draft for /data/?" in (tmp_path / "README.md").read_text(encoding="utf-8")
    ModelCard("m", "eagle3", "text").write(tmp_path / "nowhere")
    assert "README.md could not be written" in caplog.text


@pytest.mark.parametrize("target", ["/models/mine", "./mine", "mine", "a/b/c"])
def test_a_policy_that_is_no_model_of_the_hub_is_no_base_model(target):
    card = ModelCard(target, "eagle3", "text")
    assert "base_model" not in card.text and f"# Draft for {target}" in card.text
    assert "Acceptance length" not in card.text and "Made by" not in card.text


def test_the_command_is_the_one_that_makes_it_again():
    settings = PretrainSettings(Path("m"), Path("d"), rollouts=(Path("a.jsonl"), Path("b.jsonl")), steps=50)
    assert _command(settings) == [
        *("spec-plugin", "train", "--target", "m", "--out", "d"),
        *("--rollouts", "a.jsonl", "--rollouts", "b.jsonl", "--steps", "50"),
    ]


def test_a_checkpoint_has_one_beside_the_folder_that_vllm_loads(tmp_path):
    made = plugin(train_tokens=32)
    made.spec_weight_sync(event=sync())
    made.spec_target_forward(hidden=hidden(torch.arange(48)))
    made.spec_train_draft(step=0, seconds=5.0)
    made.spec_save(path=tmp_path)
    text = (tmp_path / "draft" / "README.md").read_text()
    assert "up to policy version 0" in text and '"model": "draft"' in text
    assert (tmp_path / "draft" / "draft" / "config.json").is_file()
