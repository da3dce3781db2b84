"""What ``spec-plugin train`` reads, and the commands: bad input ends in a line that says what to do, never in a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders.bad_input import TARGET, draft_in, missing, written
from click.testing import CliRunner, Result
from spec_plugin_conformance.tiny import byte_tokenizer

from spec_plugin.api.errors import SpecConfigError
from spec_plugin.commands.cli import main
from spec_plugin.commands.train import PretrainSettings, pretrain
from spec_plugin.commands.train.texts import read_prompts, read_rollouts


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(320, ("<|im_end|>", "<|pad|>"))


PROMPTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("p.json", "", ("cannot be read", "expected .json")),
    ("p.json", "{}", ("expected a list", "dict")),
    ("p.json", "[1,", ("cannot be read", "expected .json")),
    ("p.json", "[" * 100_000, ("nested too deeply", "expected texts")),
    ("p.json", "[null]", ("entry 1: no prompt", "expected a text")),
    ("p.json", "[5]", ("entry 1: expected a text", "5")),
    ("p.json", '[{"text": "a"}]', ("entry 1: no prompt", "expected a text")),
    ("p.json", '["a", ""]', ("entry 2: the prompt is empty", "remove the entry")),
    ("p.json", "[[1, 2.5]]", ("entry 1: expected a text", "2.5")),
    ("p.json", "[[1, true]]", ("entry 1: expected a text", "True")),
    ("p.json", '[["1", "2"]]', ("entry 1: expected a text", "'1'")),
    ("p.json", "[[1, -2]]", ("entry 1: token id -2", "0 to 319", "the policy's tokenizer")),
    ("p.json", "[[1, 320]]", ("entry 1: token id 320", "0 to 319", "the policy's tokenizer")),
    ("p.json", "[[1" + "0" * 300 + "]]", ("entry 1: token id 1000", "0 to 319")),
    ("p.json", '["\\ud800"]', ("entry 1", "\\ud800")),
    ("p.json", '[[{"role": "user"}]]', ("entry 1", "chat template")),
    ("p.jsonl", '"a"\n{"b"\n', ("cannot be read", "expected .json")),
    ("p.parquet", "no parquet", ("cannot be read", "expected .json")),
    ("p.txt", "just a text", ("cannot be read", "expected .json")),
)


@pytest.mark.parametrize(("name", "text", "parts"), PROMPTS, ids=lambda v: str(v)[:20])
def test_what_is_no_prompt_is_named_with_its_place(
    tmp_path: Path, tokenizer: Any, name: str, text: str, parts: tuple[str, ...]
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecConfigError) as refused:
        read_prompts(tmp_path / name, tokenizer, 320)
    assert not list(missing(str(refused.value), str(tmp_path / name), *parts)), refused.value


ROLLOUTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ('{"prompt": [1]}', ("line 1: no response", "expected one of")),
    ('{"prompt": [1], "response": [1, 999]}', ("line 1: token id 999", "0 to 319")),
    ('{"prompt": [1], "response": 5}', ("line 1: expected a text", "5")),
    ('{"response": [1]}', ("line 1: no prompt",)),
    ("5", ("line 1: no response",)),
    ('{"prompt": [1], "response": []}', ("no rollouts in",)),
)


@pytest.mark.parametrize(("line", "parts"), ROLLOUTS)
def test_what_is_no_rollout_is_named_with_its_place(
    tmp_path: Path, tokenizer: Any, line: str, parts: tuple[str, ...]
) -> None:
    (tmp_path / "r.jsonl").write_text(line + "\n")
    with pytest.raises(SpecConfigError) as refused:
        read_rollouts([tmp_path / "r.jsonl"], tokenizer, 320)
    assert not list(missing(str(refused.value), "r.jsonl", *parts)), refused.value


def test_bytes_that_are_no_text_and_a_folder_in_the_place_of_a_file_are_named(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "p.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.json").mkdir()
    for name in ("p.json", "folder.json"):
        with pytest.raises(SpecConfigError, match=f"{name} cannot be read"):
            read_prompts(tmp_path / name, tokenizer)


# spec-plugin train


def trained(tmp_path: Path, **options: Any) -> str:
    """What ``train`` refuses of these settings."""
    policy = tmp_path / "policy"
    if not policy.exists():
        written(policy, TARGET)
        byte_tokenizer(320, ("<|im_end|>", "<|pad|>")).save_pretrained(policy)
    prompts = tmp_path / "p.json"
    prompts.write_text('["a"]')
    with pytest.raises(SpecConfigError) as refused:
        pretrain(
            PretrainSettings(**{"target": policy, "out": tmp_path / "out", "prompts": prompts, **options}), show=False
        )
    return str(refused.value)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"seed": 2**64}, (f"--seed={2**64}", f"<= {2**63 - 1}")),
        ({"draft": ""}, ("--draft=''", "text or none")),
        ({"temperature": float("nan")}, ("--temperature nan", "above 0")),
        ({"temperature": float("inf")}, ("--temperature inf", "above 0")),
        ({"gpu_memory_utilization": float("nan")}, ("--gpu-memory-utilization nan", "0 to 1")),
        ({"draft_vocab_size": 10**6}, ("draft_vocab_size=1000000", "vocab_size=64")),
        ({"out": Path("/proc/x/out")}, ("--out /proc/x/out", "can be written")),
        ({"out": Path("/tmp/" + "x" * 300)}, ("--out", "File name too long")),
        ({"target": Path("/nowhere")}, ("--target /nowhere", "no config.json")),
        ({"prompts": None}, ("--prompts", "--rollouts")),
        ({"prompts": Path("/nowhere.json")}, ("/nowhere.json cannot be read",)),
    ],
    ids=lambda v: str(v)[:24],
)
def test_a_bad_setting_is_named(tmp_path: Path, options: dict[str, Any], parts: tuple[str, ...]) -> None:
    said = trained(tmp_path, **options)
    assert not list(missing(said, *parts)), said


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"torch_dtype": "auto"}, ("torch_dtype='auto'", "config.json", "bfloat16")),
        ({"torch_dtype": 16}, ("torch_dtype=16", "config.json", "bfloat16")),
        ({"torch_dtype": ["float32"]}, ("torch_dtype=['float32']", "config.json", "bfloat16")),
        ({"hidden_size": "32"}, ("hidden_size='32'", "config.json", "without quotation marks")),
    ],
    ids=str,
)
def test_a_bad_target_is_named(tmp_path: Path, change: dict[str, Any], parts: tuple[str, ...]) -> None:
    written(tmp_path / "policy", {**TARGET, **change})
    said = trained(tmp_path)
    assert not list(missing(said, str(tmp_path / "policy"), *parts)), said


def test_what_an_earlier_call_has_left_is_named_where_it_is_broken(tmp_path: Path) -> None:
    (work := tmp_path / "out.work").mkdir()
    for text in ("{", "[]"):
        (work / "settings.json").write_text(text)
        assert not list(missing(trained(tmp_path), str(work / "settings.json"), "to start over"))


def test_a_tokenizer_that_is_not_there_and_one_rollout_are_named(tmp_path: Path) -> None:
    said = trained(tmp_path, target=written(tmp_path / "bare", TARGET))
    assert not list(missing(said, "--target", "tokenizer", "put the policy's tokenizer")), said
    (tmp_path / "r.jsonl").write_text(json.dumps({"prompt": [1], "response": [2]}) + "\n")
    said = trained(tmp_path, prompts=None, rollouts=(tmp_path / "r.jsonl",), out=tmp_path / "other")
    assert not list(missing(said, "answer one prompt", "at least two prompts")), said


# the commands


def invoke(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "500"}).invoke(main, list(arguments))


COMMANDS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("check", "nemo", "--", "x=1"), ("nemo", "openrlhf")),
    (("check", "openrlhf", "--model-config", "/nowhere.json", "--", "--vllm.num_engines", "1"), ("/nowhere.json",)),
    (("check", "openrlhf", "--model-config", "LIST", "--", "--vllm.num_engines", "1"), ("is not a JSON object",)),
    (("check", "openrlhf", "--model-config", "BAD", "--", "--actor.model_name_or_path", "x"), ("vocab_size='64'",)),
    (("check", "openrlhf", "--", "--actor.model_name_or_path", "x" * 5000), ("File name too long",)),
    (("check", "openrlhf", "--", "--actor.model_name_or_path", "FOLDER"), ("vocab_size='64'",)),
    (("check",), ("Missing argument",)),
    (("train", "--target", "FOLDER", "--out", "/x/out", "--prompts", "/nowhere.json"), ("vocab_size='64'",)),
    (("train", "--target", "FOLDER", "--out", "/x/out", "--k", "99"), ("99", "1<=x<=16")),
    (("train", "--target", "FOLDER", "--out", "/x/out", "--seed", "now"), ("now", "integer")),
    (("doctors",), ("No such command",)),
)


@pytest.mark.parametrize(("arguments", "parts"), COMMANDS, ids=lambda v: " ".join(v)[:40])
def test_a_command_ends_in_a_line_and_not_in_a_traceback(
    tmp_path: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    bad = written(tmp_path / "bad", {**TARGET, "vocab_size": "64"})
    (tmp_path / "list.json").write_text("[]")
    places = {"BAD": str(bad / "config.json"), "FOLDER": str(bad), "LIST": str(tmp_path / "list.json")}
    done = invoke(*(places.get(a, a) for a in arguments))
    assert isinstance(done.exception, SystemExit | None) and done.exit_code != 0, done.exception
    said = done.stdout + done.stderr
    assert not list(missing(said, *parts)) and "Traceback" not in said, said


def test_the_doctor_names_a_target_and_a_draft_that_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spec_plugin.commands import doctor

    for name in ("versions", "capabilities", "patches", "adapters", "plugins"):
        monkeypatch.setattr(doctor, f"examine_{name}", lambda: ())
    bad = written(tmp_path / "bad", {**TARGET, "vocab_size": "64"})
    good, draft = written(tmp_path / "good", TARGET), draft_in(tmp_path / "draft", {"hidden_size": "32"})
    for target, parts in ((bad, ("vocab_size='64'", str(bad))), (good, ("hidden_size='32'", str(draft)))):
        done = invoke("doctor", "--target", str(target), "--draft", str(draft))
        assert done.exit_code == 1 and not list(missing(done.stdout, "FAIL", "fix: ", *parts)), done.stdout
