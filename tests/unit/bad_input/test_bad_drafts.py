"""Drafts from outside: each mistake in config.json or weights is named with value, file and what to do, before the engine."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.bad_input import (
    HUGE,
    INFINITE,
    NAN,
    TARGET,
    draft_in,
    draft_tensors,
    missing,
    of_a_run,
    of_the_check,
    of_the_doctor,
    written,
)
from builders.frozen import config_of, tensors_of
from safetensors.torch import load_file, save_file

from draft_training import DraftConfig, load_draft
from draft_training.small_lm import SmallLmShape
from draft_training.small_lm_module import SmallLmKind

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return written(tmp_path / "policy", TARGET)


FIELDS: tuple[tuple[str, Any, str, str], ...] = (
    ("vocab_size", "64", "='64'", "without quotation marks"),
    ("vocab_size", NAN, "=nan", "a whole number"),
    ("hidden_size", [32], "=[32]", "a whole number"),
    ("hidden_size", 48, "=48", "another width"),
    ("intermediate_size", HUGE, "=1000", "a whole number"),
    ("intermediate_size", 64, "[64, 32]", "correct it"),
    ("num_attention_heads", 0, "num_attention_heads=0", "from 1 to"),
    ("num_attention_heads", 3, "heads=3", "multiple of kv heads"),
    ("num_key_value_heads", "2", "='2'", "without quotation marks"),
    ("head_dim", 31, "head_dim=31", "head_dim even"),
    ("draft_vocab_size", 0, "=0", "from 1 to"),
    ("draft_vocab_size", "32", "='32'", "without quotation marks"),
    ("draft_vocab_size", 65, "=65", "between 1 and"),
    ("target_hidden_size", {}, "={}", "a whole number"),
    ("target_hidden_size", 64, "=64", "not supported"),
    ("rms_norm_eps", "tiny", "='tiny'", "a number above 0"),
    ("rope_theta", INFINITE, "=inf", "a number above 0"),
    ("rope_parameters", {"rope_type": "linear", "factor": []}, "factor=[]", "a number above 0"),
    ("partial_rotary_factor", 0, "partial_rotary_factor=0", "not supported"),
    ("quantization_config", {"quant_method": "fp8"}, "sets quantization_config", "start from a draft without"),
    ("max_position_embeddings", "64", "='64'", "without quotation marks"),
    ("num_hidden_layers", 2, "=2", "one layer"),
    ("num_hidden_layers", "1", "='1'", "without quotation marks"),
    ("eagle_aux_hidden_state_layer_ids", "2,4,5", "='2,4,5'", "a list of layers"),
    ("eagle_aux_hidden_state_layer_ids", [2, "4"], "[1]='4'", "a list of layers"),
    ("eagle_aux_hidden_state_layer_ids", [-1, 2], "[0]=-1", "a list of layers"),
    ("eagle_aux_hidden_state_layer_ids", [5, 4, 2], "[5, 4, 2]", "ascending"),
    ("eagle_aux_hidden_state_layer_ids", [2, 4, 9], "[2, 4, 9]", "layers 0 to 7"),
    ("eagle_config", [1], "=[1]", "a mapping"),
    ("eagle_config", {"use_aux_hidden_state": "no"}, "use_aux_hidden_state='no'", "true or false"),
    ("eagle_config", {"use_aux_hidden_state": False}, "use_aux_hidden_state=false", "start from a draft without it"),
    ("norm_before_residual", "true", "='true'", "true or false"),
    ("logit_scale", "1", "='1'", "a number"),
    ("logit_scale", 2.0, "=2.0", "start from a draft without it"),
    ("hidden_act", 3, "=3", "a text"),
    ("hidden_act", "gelu", "='gelu'", "start from a draft without it"),
    ("architectures", "LlamaForCausalLMEagle3", "='Llama", "a list of texts"),
    ("architectures", ["MedusaModel"], "MedusaModel", "can be trained"),
    ("speculators_model_type", 3, "=3", "a text"),
    ("speculators_model_type", "hass", "'hass'", "can be trained"),
)


@pytest.mark.parametrize(("field", "value", "shown", "expected"), FIELDS, ids=lambda v: str(v)[:24])
def test_a_bad_field_of_a_draft_is_named(
    tmp_path: Path, target: Path, field: str, value: Any, shown: str, expected: str
) -> None:
    draft = draft_in(tmp_path / "draft", {field: value})
    for said in (of_a_run(target, draft=str(draft)), of_the_check(target, draft=draft), of_the_doctor(target, draft)):
        assert not list(missing(said, shown, expected)), said
    assert str(draft) in of_a_run(target, draft=str(draft))


@pytest.mark.parametrize("layer", [[1], "llama", {"hidden_size": "32"}, {"model_type": 5}])
def test_a_bad_layer_in_speculators_layout_is_named(tmp_path: Path, target: Path, layer: Any) -> None:
    draft = draft_in(tmp_path / "draft")
    written(draft, {"speculators_model_type": "eagle3", "transformer_layer_config": layer})
    for said in (of_a_run(target, draft=str(draft)), of_the_doctor(target, draft)):
        assert str(draft / "config.json") in said and any(k in said for k in ("transformer_layer", "hidden_size='32'"))


TEXTS = ("", "{", "[]", '"x"', "{" + "[" * 50_000, '{"vocab_size": ' + "9" * 5000 + "}")


@pytest.mark.parametrize("text", TEXTS, ids=lambda v: v[:16])
@pytest.mark.parametrize("options", [{}, {"method": "draft_model"}, {"train": False}, {"method": "auto"}], ids=str)
def test_a_config_json_that_is_none_is_named_by_each_method(
    tmp_path: Path, target: Path, text: str, options: dict[str, Any]
) -> None:
    draft = written(draft_in(tmp_path / "draft"), text)
    for said in (of_a_run(target, draft=str(draft), **options), of_the_check(target, draft=draft, **options)):
        assert str(draft) in said, said


def changed(change: Callable[[Tensors], Any], pruned: int | None = None) -> Callable[[Path], str]:
    """A draft whose tensors are changed."""

    def make(folder: Path) -> str:
        file = draft_in(folder, pruned=pruned) / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
        return str(folder)

    return make


def put(name: str, at: int, value: float) -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        tensors[name].view(-1)[at] = value

    return change


def raw(content: Callable[[bytes], bytes]) -> Callable[[Path], str]:
    """A draft whose file's bytes are changed."""

    def make(folder: Path) -> str:
        file = draft_in(folder) / "model.safetensors"
        file.write_bytes(content(file.read_bytes()))
        return str(folder)

    return make


def lying(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], str]:
    """A draft whose header says what is not so."""

    def content(old: bytes) -> bytes:
        (length,) = struct.unpack("<Q", old[:8])
        header = json.loads(old[8 : 8 + length])
        change(header)
        told = json.dumps(header).encode()
        return struct.pack("<Q", len(told)) + told + old[8 + length :]

    return raw(content)


FC, NORM = "fc.weight", "norm.weight"
WEIGHTS: dict[str, tuple[Callable[[Path], str], tuple[str, ...]]] = {
    "NaN": (changed(put(FC, 7, NAN)), (FC, "1 numbers that are not finite", "nan at 7 of", "train it again")),
    "infinite": (changed(put(NORM, 0, -INFINITE)), (NORM, "-inf at 0 of 32", "train it again")),
    "whole numbers": (changed(lambda t: t.update({FC: t[FC].to(torch.int8)})), (FC, "int8", "convert it")),
    "wrong shape": (changed(lambda t: t.update({NORM: t[NORM][:16].clone()})), (NORM, "[16]", "[32]", "correct it")),
    "missing": (changed(lambda t: t.pop(FC)), (FC, "missing", "config.json")),
    "unknown": (changed(lambda t: t.update({"head.0": torch.ones(2)})), ("head.0", "unknown", "config.json")),
    "fused": (
        changed(lambda t: t.update({"midlayer.self_attn.qkv_proj.weight": torch.ones(2)})),
        ("qkv_proj", "export it"),
    ),
    "twice": (changed(lambda t: t.update({f"model.{FC}": t[FC].clone()})), (FC, "twice", "remove one")),
    "d2t too high": (changed(put("d2t", 31, 40), 32), ("d2t[31]=40", "token 71", "0 to 63", "made for this target")),
    "d2t too low": (changed(put("d2t", 2, -3), 32), ("d2t[2]=-3", "token -1", "0 to 63", "made for this target")),
    "d2t overflows": (changed(put("d2t", 31, 2**63 - 1), 32), ("d2t[31]=", "0 to 63", "made for this target")),
    "d2t doubled": (changed(put("d2t", 1, -1), 32), ("maps 1 draft tokens", "export the draft again")),
    "d2t of floats": (changed(lambda t: t.update(d2t=t["d2t"].float()), 32), ("d2t", "float32", "int64 offsets")),
    "d2t of another length": (
        changed(lambda t: t.update(d2t=t["d2t"][:9].clone()), 32),
        ("d2t", "[9]", "[32]", "correct it"),
    ),
    "no d2t": (changed(lambda t: t.pop("d2t"), 32), ("missing ['d2t']", "config.json")),
    "empty file": (raw(lambda b: b""), ("model.safetensors", "copy it again")),
    "cut off": (raw(lambda b: b[:-100]), ("model.safetensors", "copy it again")),
    "cut in the header": (raw(lambda b: b[:40]), ("model.safetensors", "copy it again")),
    "eight bytes": (raw(lambda b: b"\xff" * 8), ("model.safetensors", "copy it again")),
    "a header without end": (raw(lambda b: struct.pack("<Q", 2**62) + b[8:]), ("model.safetensors", "copy it again")),
    "a header of other bytes": (raw(lambda b: b[:8] + b"\xff" * (len(b) - 8)), ("model.safetensors", "copy it again")),
    "a pickle": (raw(lambda b: b"\x80\x04K\x01."), ("model.safetensors", "copy it again")),
    "longer than it says": (raw(lambda b: b + b"more"), ("model.safetensors", "copy it again")),
    "lies of a shape": (lying(lambda h: h[NORM].update(shape=[2**40])), ("model.safetensors", "copy it again")),
    "lies below zero": (lying(lambda h: h[NORM].update(shape=[-32])), ("model.safetensors", "copy it again")),
    "lies of a dtype": (lying(lambda h: h[NORM].update(dtype="F1")), ("model.safetensors", "copy it again")),
    "lies of a place": (
        lying(lambda h: h[NORM].update(data_offsets=[0, 2**60])),
        ("model.safetensors", "copy it again"),
    ),
    "one on the other": (
        lying(lambda h: h[NORM].update(data_offsets=h[FC]["data_offsets"])),
        ("safetensors", "copy it again"),
    ),
    "a list for a header": (raw(lambda b: struct.pack("<Q", 2) + b"[]"), ("model.safetensors", "copy it again")),
    "no tensors": (raw(lambda b: struct.pack("<Q", 2) + b"{}"), ("missing", "config.json")),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_bad_weights_are_named_before_the_engine_starts(tmp_path: Path, target: Path, case: str) -> None:
    make, parts = WEIGHTS[case]
    draft = make(tmp_path / "draft")
    for said in (of_a_run(target, draft=draft), of_the_check(target, draft=draft), of_the_doctor(target, Path(draft))):
        assert not list(missing(said, *parts)), said


def test_a_file_that_is_none_two_files_with_one_name_and_no_file_at_all_are_named(tmp_path: Path, target: Path) -> None:
    odd, twice, none = (draft_in(tmp_path / name) for name in ("odd", "twice", "none"))
    for folder in (odd, none):
        (folder / "model.safetensors").unlink()
    (odd / "model.safetensors").mkdir()
    (twice / "more.safetensors").write_bytes((twice / "model.safetensors").read_bytes())
    for folder, parts in (
        (odd, ("model.safetensors", "it is no file")),
        (twice, ("is both in", "more.safetensors", "remove one of the files")),
        (none, (str(none), "no *.safetensors file")),
    ):
        for said in (of_a_run(target, draft=str(folder)), of_the_doctor(target, folder)):
            assert not list(missing(said, *parts)), said


def test_a_folder_that_is_not_there_is_named_by_each_method(tmp_path: Path, target: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    for options in ({}, {"method": "draft_model"}, {"train": False}, {"method": "auto"}):
        for said in (of_a_run(target, draft=nowhere, **options), of_the_check(target, draft=nowhere, **options)):
            assert not list(missing(said, "spec.draft=", nowhere, "give the folder of")), said


def test_a_map_that_is_not_the_other_one_turned_round_is_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draft = changed(lambda t: t.update(t2d=torch.zeros(64, dtype=torch.uint8)), 32)(tmp_path / "draft")
    with caplog.at_level(logging.WARNING):
        found = load_draft(draft, TARGET)[1]
    assert found["t2d"].dtype == torch.bool and found["t2d"].tolist() == [True] * 32 + [False] * 32
    assert "is rebuilt from it" in caplog.text


def test_the_files_that_an_index_names_are_read_and_no_others(tmp_path: Path, target: Path) -> None:
    draft = draft_in(tmp_path / "draft")
    whole = (draft / "model.safetensors").read_bytes()
    (draft / "copy.safetensors").write_bytes(whole)
    names = load_file(draft / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (draft / "model.safetensors.index.json").write_text(json.dumps(index))
    assert of_a_run(target, draft=str(draft)) == ""
    (draft / "model.safetensors").unlink()
    said = of_a_run(target, draft=str(draft))
    assert not list(missing(said, "model.safetensors cannot be read", "No such file")), said


# drafts that are served as they are


def frozen(folder: Path, offsets: Any = None, weight: float = 1.0) -> str:
    written(folder, {**config_of("eagle3"), "max_position_embeddings": 64, "draft_vocab_size": len(offsets or [0])})
    maps = {} if offsets is None else {"d2t": torch.tensor(offsets)}
    save_file(
        {**tensors_of("eagle3"), "fc.weight": torch.full((64, 192), weight), **maps}, folder / "model.safetensors"
    )
    return str(folder)


@pytest.mark.parametrize(
    ("offsets", "weight", "parts"),
    [
        ([0, 0, 62], 1.0, ("d2t[2]=62", "token 64", "0 to 63", "made for this target")),
        ([0, -2], 1.0, ("d2t[1]=-2", "token -1", "made for this target")),
        ([0.0, 1.0], 1.0, ("float32", "int64 offsets")),
        ([[0, 1]], 1.0, ("[1, 2]", "int64 offsets")),
        ([0, 1], NAN, ("fc.weight", "not finite", "take another")),
    ],
    ids=str,
)
def test_a_frozen_draft_that_would_kill_the_engine_is_refused(
    tmp_path: Path, target: Path, offsets: Any, weight: float, parts: tuple[str, ...]
) -> None:
    said = of_a_run(target, draft=frozen(tmp_path / "draft", offsets, weight), train=False)
    assert not list(missing(said, str(tmp_path / "draft"), *parts)), said


def test_a_frozen_draft_that_is_right_is_served(tmp_path: Path, target: Path) -> None:
    assert of_a_run(target, draft=frozen(tmp_path / "draft", [0, 1, 61]), train=False) == ""


@pytest.mark.parametrize(
    "index",
    [
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"fc.weight": "../../etc/passwd"}}',
        "{",
    ],
)
def test_an_index_that_is_none_is_named(tmp_path: Path, target: Path, index: str) -> None:
    draft = Path(frozen(tmp_path / "draft"))
    (draft / "model.safetensors.index.json").write_text(index)
    written(draft, {"architectures": ["LlamaForCausalLM"]})
    said = of_a_run(target, draft=str(draft), train=False)
    assert "model.safetensors.index.json" in said and "spec.draft=" in said


# a small language model as a draft

SMALL: tuple[tuple[str, Any, str], ...] = (
    ("vocab_size", "64", "without quotation marks"),
    ("vocab_size", 65, "smaller model of the same family"),
    ("num_hidden_layers", 10**6, "from 1 to 4096"),
    ("num_attention_heads", 0, "from 1 to"),
    ("hidden_size", HUGE, "from 1 to"),
    ("max_position_embeddings", 8, "shorter than the engine's texts of 64"),
    ("max_position_embeddings", "long", "a whole number"),
    ("tie_word_embeddings", "no", "true or false"),
    ("model_type", ["llama"], "can"),
    ("hidden_act", 5, "correct it there"),
    ("hidden_act", "no such thing", "correct it there"),
    ("rope_scaling", "linear", "a mapping"),
    ("attention_bias", {"a": 1}, ""),
)


@pytest.mark.parametrize(("field", "value", "expected"), SMALL, ids=lambda v: str(v)[:24])
def test_a_bad_field_of_a_small_model_is_named(
    tmp_path: Path, target: Path, field: str, value: Any, expected: str
) -> None:
    shape = SmallLmShape.from_target(TARGET)
    folder = tmp_path / "draft"
    folder.mkdir()
    SmallLmKind(shape).write(folder, draft_tensors(shape))  # type: ignore[arg-type]
    assert of_a_run(target, method="draft_model", draft=str(folder)) == ""
    config = json.loads((folder / "config.json").read_text())
    written(folder, {**config, field: value})
    said = of_a_run(target, method="draft_model", draft=str(folder))
    assert not list(missing(said, "spec.draft=", expected)) and (field in said or "config.json" in said), said


def test_a_small_model_that_is_not_finite_is_named(tmp_path: Path, target: Path) -> None:
    shape = SmallLmShape.from_target(TARGET)
    tensors = draft_tensors(shape)  # type: ignore[arg-type]
    (folder := tmp_path / "draft").mkdir()
    tensors["model.norm.weight"][3] = NAN
    SmallLmKind(shape).write(folder, tensors)
    said = of_a_run(target, method="draft_model", draft=str(folder))
    assert not list(missing(said, "model.norm.weight", "nan at 3 of", "take another"))


# options beside a draft that is given


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"draft_vocab_size": 48}, ("spec.draft_vocab_size=48", "has 64", "leave one")),
        ({"aux_layers": (1, 2, 3)}, ("spec.aux_layers=(1, 2, 3)", "(2, 4, 5)", "leave one")),
        ({"aux_layers": (1, 2), "train": False, "method": "frozen"}, ("spec.aux_layers=(1, 2)", "leave it out")),
        ({"draft_vocab_size": 48, "method": "auto"}, ("spec.draft_vocab_size=48", "has 64", "leave one")),
    ],
    ids=str,
)
def test_an_option_of_shape_that_a_given_draft_would_ignore_is_refused(
    tmp_path: Path, target: Path, options: dict[str, Any], parts: tuple[str, ...]
) -> None:
    said = of_a_run(target, draft=str(draft_in(tmp_path / "draft")), **options)
    assert not list(missing(said, *parts)), said


def test_an_option_of_shape_that_says_what_the_draft_has_is_no_trouble(tmp_path: Path, target: Path) -> None:
    draft = str(draft_in(tmp_path / "draft"))
    assert of_a_run(target, draft=draft, aux_layers=(2, 4, 5), draft_vocab_size=64) == ""
    assert DraftConfig.from_target(TARGET).aux_layers == (2, 4, 5)
