from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from spec_plugin_conformance.tiny import byte_tokenizer

from spec_plugin.api.errors import SpecConfigError
from spec_plugin.commands.train import PretrainSettings, pretrain, run
from spec_plugin.commands.train.texts import read_prompts, read_rollouts
from spec_plugin.engine.vllm.offline import lines_of


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = byte_tokenizer(320, ("<|im_end|>", "<|pad|>"))
    made.chat_template = (
        "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    return made


def written(file: Path, content: Any) -> Path:
    lines = file.suffix == ".jsonl"
    file.write_text("\n".join(map(json.dumps, content)) + "\n" if lines else json.dumps(content))
    return file


def texts(tokenizer: Any, found: list[list[int]]) -> list[str]:
    return [tokenizer.decode(ids) for ids in found]


CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("name", ["p.json", "p.jsonl"])
def test_prompts_may_be_texts_chats_or_rows(tmp_path, tokenizer, name):
    file = written(tmp_path / name, ["ab", CHAT, {"prompt": CHAT, "answer": 1}, {"prompt": "cd"}, {"prompt": [40, 41]}])
    found = read_prompts(file, tokenizer)
    assert texts(tokenizer, found[:4]) == ["ab", "[hi]>", "[hi]>", "cd"] and found[4] == [40, 41]


def test_prompts_may_be_a_trainers_parquet(tmp_path, tokenizer):
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame({"prompt": [CHAT, CHAT], "reward_model": [{"ground_truth": "1"}] * 2}).to_parquet(
        tmp_path / "p.parquet"
    )
    assert texts(tokenizer, read_prompts(tmp_path / "p.parquet", tokenizer)) == ["[hi]>"] * 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "holds no prompts"),
        ({"a": 1}, "expected a list"),
        ([{"text": "a"}], "entry 1: no prompt"),
        ([""], "is empty"),
        ([3.5], "entry 1: expected a text"),
    ],
)
def test_what_is_no_prompt_is_named_with_its_place(tmp_path, tokenizer, content, said):
    with pytest.raises(SpecConfigError) as error:
        read_prompts(written(tmp_path / "p.json", content), tokenizer)
    assert said in str(error.value)


def test_a_file_that_is_not_there_or_broken_is_named(tmp_path, tokenizer):
    (tmp_path / "p.json").write_text("[1,")
    for file in ("p.json", "missing.jsonl"):
        with pytest.raises(SpecConfigError, match=file):
            read_prompts(tmp_path / file, tokenizer)


def test_rollouts_are_read_from_rows_and_from_a_folder_of_verls_dumps(tmp_path, tokenizer):
    (tmp_path / "dumps").mkdir()
    written(tmp_path / "dumps" / "1.jsonl", [{"input": "a", "output": "b", "score": 1.0}, {"input": "a", "output": ""}])
    own = written(tmp_path / "own.jsonl", [{"prompt": [40], "response": [41, 42]}])
    found = read_rollouts([tmp_path / "dumps", own], tokenizer)
    end = tokenizer.eos_token_id
    (a,), (b,) = tokenizer("a").input_ids, tokenizer("b").input_ids
    assert [(r.prompt, r.response) for r in found] == [((a,), (b, end)), ((a,), (end,)), ((40,), (41, 42))]


def test_rollouts_without_a_response_are_refused(tmp_path, tokenizer):
    with pytest.raises(SpecConfigError, match="line 1: no response"):
        read_rollouts([written(tmp_path / "r.jsonl", [{"prompt": "a"}])], tokenizer)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecConfigError, match=r"no \.jsonl file"):
        read_rollouts([tmp_path / "empty"], tokenizer)


def test_a_line_that_was_cut_off_is_taken_out(tmp_path):
    file = tmp_path / "r.jsonl"
    assert lines_of(file) == 0
    file.write_text('{"a": 1}\n{"b"')
    assert lines_of(file) == 1 and file.read_text() == '{"a": 1}\n'


def test_wrong_settings_are_refused_before_anything_is_begun(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "policy").mkdir()
    written(tmp_path / "policy" / "config.json", {"model_type": "gpt2"})
    policy, prompts = tmp_path / "policy", tmp_path / "p.json"
    for settings, said in (
        (PretrainSettings(policy, tmp_path / "out"), "--prompts"),
        (PretrainSettings(policy, tmp_path / "out", prompts, (prompts,)), "--prompts"),
        (PretrainSettings(tmp_path, tmp_path / "out", prompts), "no config.json"),
        (PretrainSettings(policy, tmp_path / "there", prompts), "exists"),
        (PretrainSettings(policy, tmp_path / "out", prompts), "GPT2LMHeadModel"),
    ):
        with pytest.raises(SpecConfigError, match=said):
            pretrain(settings, show=False)
    assert not (tmp_path / "out.work").exists()


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (
            100_000,
            r"its weights take 0\.1 GB, and a GPU has 0\.0 GB, of which 85% may be theirs: .* let the run train its draft",
        ),
        (0, r"its weights take 0\.2 GB, and this machine has 0\.1 GB, of which 90% may be theirs"),
    ],
)
def test_a_policy_that_one_device_cannot_hold_is_refused_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int, said: str
) -> None:
    """Once it ended in a traceback of torch's, out of memory."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "torch_dtype": "bfloat16"}))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(100_000_000)
    monkeypatch.setattr(run, "_card_memory", lambda: memory)
    monkeypatch.setattr(run.os, "sysconf", {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 100_000_000}.__getitem__)
    settings = PretrainSettings(tmp_path, tmp_path / "out", prompts=tmp_path / "prompts.jsonl")
    with pytest.raises(SpecConfigError, match=said):
        pretrain(settings, show=False)
    assert not (tmp_path / "out.work").exists()
