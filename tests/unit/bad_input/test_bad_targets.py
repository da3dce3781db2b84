"""config.json of a target from outside: one sentence names the field that is wrong, its value, the file and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders.bad_input import (
    HUGE,
    INFINITE,
    NAN,
    READERS,
    TARGET,
    WRONG_NUMBERS,
    draft_in,
    missing,
    of_a_run,
    of_the_check,
    of_the_doctor,
    written,
)

from spec_plugin import SpecConfig, SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.engine.front import EngineFront
from spec_plugin.lifecycle.manager import create_manager
from spec_plugin.lifecycle.session import SpecSession

WHOLE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
#: field, what it says, and what the message must hold besides both and the file
ROWS: tuple[tuple[str, Any, str], ...] = (
    *((name, value, "a whole number from 1 to") for name in WHOLE[:2] for value, _ in WRONG_NUMBERS.values()),
    *((name, "8", "without quotation marks") for name in WHOLE[2:]),
    *((name, HUGE, "a whole number from 1 to") for name in WHOLE[2:]),
    ("num_hidden_layers", 10**6, "from 1 to 4096"),
    ("rms_norm_eps", "1e-6", "without quotation marks"),
    ("rms_norm_eps", NAN, "a number above 0"),
    ("rms_norm_eps", -1e-6, "a number above 0"),
    ("rope_theta", "1e6", "without quotation marks"),
    ("rope_theta", INFINITE, "a number above 0"),
    ("rope_theta", 0, "a number above 0"),
    ("rope_theta", HUGE, "a number above 0"),
    ("rope_scaling", "linear", "a mapping"),
    ("rope_scaling", [1], "a mapping"),
    ("rope_parameters", 5, "a mapping"),
    ("partial_rotary_factor", "half", "a number"),
    ("tie_word_embeddings", "no", "true or false"),
    ("architectures", "Qwen3ForCausalLM", "a list of texts"),
    ("architectures", 5, "a list of texts"),
    ("text_config", ["a"], "a mapping"),
    ("model_type", ["qwen3"], "a text"),
    ("model_type", 3, "a text"),
)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("field", "value", "expected"), ROWS, ids=lambda v: str(v)[:24])
def test_a_bad_field_is_named_with_its_value_its_file_and_what_is_expected(
    tmp_path: Path, reader: str, field: str, value: Any, expected: str
) -> None:
    said = READERS[reader](written(tmp_path / "policy", {**TARGET, field: value}))
    assert not list(missing(said, f"{field}", repr(value)[:20], str(tmp_path / "policy"), expected, "correct it")), said


@pytest.mark.parametrize(("field", "value", "expected"), ROWS, ids=lambda v: str(v)[:24])
def test_the_doctor_says_it_too(tmp_path: Path, field: str, value: Any, expected: str) -> None:
    said = of_the_doctor(written(tmp_path / "policy", {**TARGET, field: value}))
    assert not list(missing(said, field, repr(value)[:20], str(tmp_path / "policy"), expected)), said


SCALINGS: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"rope_type": "linear"}, "lacks ['factor']", "add them"),
    ({"rope_type": "linear", "factor": "2"}, "factor='2'", "without quotation marks"),
    ({"rope_type": "linear", "factor": 0}, "factor=0", "a number above 0"),
    ({"rope_type": "linear", "factor": NAN}, "factor=nan", "a number above 0"),
    ({"type": "llama3", "factor": 8.0}, "lacks ['high_freq_factor'", "add them"),
    ({"rope_type": ["linear"], "factor": 2.0}, "['linear']", "another method"),
    ({"rope_type": 7}, "7", "another method"),
    ({"rope_type": "yarn", "factor": 4.0}, "lacks ['original_max_position_embeddings']", "add them"),
    (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 5.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "low_freq_factor=5.0",
        "below high_freq_factor=4.0",
    ),
    (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": "32",
        },
        "original_max_position_embeddings='32'",
        "without quotation marks",
    ),
)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(("scaling", "what", "instead"), SCALINGS, ids=lambda v: str(v)[:24])
def test_a_bad_rope_scaling_is_named(
    tmp_path: Path, key: str, scaling: dict[str, Any], what: str, instead: str
) -> None:
    folder = written(tmp_path / "policy", {**TARGET, key: scaling})
    for said in (of_a_run(folder), of_the_check(folder), of_the_doctor(folder)):
        assert not list(missing(said, what, str(folder), instead)), said


SHAPES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"num_attention_heads": 4, "num_key_value_heads": 3}, "heads=4, kv heads=3"),
    ({"head_dim": 31}, "head_dim=31"),
    ({"head_dim": None, "hidden_size": 2}, "head_dim=0"),
    ({"hidden_size": 1 << 19, "intermediate_size": 1 << 20}, "billion parameters"),
)


@pytest.mark.parametrize(("changes", "what"), SHAPES, ids=lambda v: str(v)[:24])
def test_numbers_that_do_not_go_together_are_named(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    folder = written(tmp_path / "policy", {**TARGET, **changes})
    for said in (of_a_run(folder), of_the_check(folder), of_the_doctor(folder)):
        assert what in said


FILES: tuple[tuple[str, str], ...] = (
    ("", "Expecting value"),
    ("{", "Expecting property name"),
    ("[1, 2]", "is not a JSON object, but [1, 2]"),
    ('"qwen3"', "is not a JSON object, but 'qwen3'"),
    ("null", "is not a JSON object, but None"),
    ("{}", "lacks"),
    ('{"model_type": "qwen3"}', "lacks vocab_size, hidden_size"),
    ('{"vocab_size": ' + "1" * 5000 + "}", "4300 digits"),
    ('{"a": ' + "[" * 100_000, "nested too deeply"),
    ("\ufeff{}", "BOM"),
)


@pytest.mark.parametrize(("text", "what"), FILES, ids=lambda v: v[:16])
def test_a_file_that_is_no_config_json_is_named(tmp_path: Path, text: str, what: str) -> None:
    folder = written(tmp_path / "policy", text)
    for said in (of_a_run(folder), of_the_check(folder), of_the_doctor(folder)):
        assert what in said and str(folder) in said, said


def test_bytes_that_are_no_text_a_folder_and_nothing_at_all_are_named(tmp_path: Path) -> None:
    binary, folder, nothing = (written(tmp_path / name, "{}") for name in ("binary", "folder", "nothing"))
    (binary / "config.json").write_bytes(b"\xff\xfe\x00{")
    for place in (folder, nothing):
        (place / "config.json").unlink()
    (folder / "config.json").mkdir()
    for place, what in ((binary, "can't decode byte"), (folder, "it is no file"), (nothing, "No such file")):
        for said in (of_a_run(place), of_the_check(place), of_the_doctor(place)):
            assert what in said and str(place / "config.json") in said


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "max_position_embeddings"])
def test_a_target_that_lacks_a_size_is_told_so_by_each_method(tmp_path: Path, method: str, field: str) -> None:
    folder = written(tmp_path / "policy", {k: v for k, v in TARGET.items() if k != field})
    for said in (of_a_run(folder, method=method), of_the_check(folder, method=method)):
        assert not list(missing(said, f"lacks {field}", str(folder), "give the whole config.json")), said


MTP = {**TARGET, "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
OF_MTP: tuple[tuple[str, Any, str], ...] = (
    ("num_nextn_predict_layers", "1", "one MTP layer can be trained"),
    ("num_nextn_predict_layers", [1], "one MTP layer can be trained"),
    ("num_nextn_predict_layers", NAN, "one MTP layer can be trained"),
    ("rms_norm_eps", None, "lacks rms_norm_eps"),
    ("num_hidden_layers", "8", "without quotation marks"),
    ("architectures", "MiMoForCausalLM", "a list of texts"),
    ("intermediate_size", HUGE, "a whole number"),
)


@pytest.mark.parametrize(("field", "value", "expected"), OF_MTP, ids=lambda v: str(v)[:24])
def test_a_bad_field_of_a_target_with_a_layer_of_its_own(tmp_path: Path, field: str, value: Any, expected: str) -> None:
    folder = written(tmp_path / "policy", {**MTP, field: value})
    for said in (of_a_run(folder, method="mtp"), of_the_check(folder, method="mtp")):
        assert not list(missing(said, field, str(folder), expected)), said


def test_a_layer_that_is_served_as_it_is_has_a_number(tmp_path: Path) -> None:
    other = {**MTP, "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": "8"}
    folder = draft_in(tmp_path / "policy")
    written(folder, other)
    said = of_a_run(folder, method="mtp", train=False)
    assert not list(missing(said, "num_hidden_layers='8'", str(folder), "without quotation marks")), said


def test_a_correct_target_is_no_trouble_to_anybody(tmp_path: Path) -> None:
    folder = written(tmp_path / "policy", TARGET)
    assert of_a_run(folder) == of_the_check(folder) == of_the_doctor(folder) == ""
    floats = {**TARGET, "vocab_size": 64.0, "max_position_embeddings": 64.0, "rope_theta": 10_000, "head_dim": None}
    assert of_a_run(written(folder, floats)) == ""


def test_what_a_look_up_does_not_read_may_be_anything(tmp_path: Path) -> None:
    """Families give sizes as lists, one a layer, and Mamba's config.json holds an infinity: such a run is a correct one."""
    odd = {
        **TARGET,
        "model_type": "other",
        "intermediate_size": [1, 2],
        "num_key_value_heads": [1],
        "limit": [0.0, INFINITE],
    }
    folder = written(tmp_path / "policy", json.loads(json.dumps(odd)))
    assert of_a_run(folder, method="ngram") == of_the_check(folder, method="ngram") == ""


def test_a_target_whose_vocabulary_is_not_told_is_refused_before_the_engine_starts(tmp_path: Path) -> None:
    odd = {k: v for k, v in TARGET.items() if k != "vocab_size"}
    info = TargetInfo(str(tmp_path), odd, "float32", max_num_seqs=8)
    session = SpecSession(SpecConfig.parse({"method": "ngram"}), info, create_manager((), (), load_entry_points=False))
    with pytest.raises(SpecConfigError) as refused:
        EngineFront(session, None).engine_arguments({}, "x")
    assert not list(
        missing(str(refused.value), "names no vocab_size", str(tmp_path), "use the model's complete config.json")
    )
    in_parts = TargetInfo("m", {**odd, "text_config": {"vocab_size": 64}}, "float32")
    assert in_parts.vocab_size == 64
