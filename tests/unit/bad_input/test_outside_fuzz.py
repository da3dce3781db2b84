"""Whatever bytes and whatever values: a config.json or a safetensors file is parsed, or answered with an error of our own."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import spec_plugin_openrlhf.options as openrlhf_options
import torch
from builders.bad_input import TARGET, draft_tensors
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from spec_plugin_verl_check import options as verl

from draft_training import CheckpointError, DraftConfig, DraftConfigError, load_draft, validate_draft
from draft_training.files import places, read_json
from draft_training.mtp import MtpShape
from draft_training.small_lm import SmallLmShape
from draft_training.weights import read_tensors, refuse_broken
from spec_plugin import SpecConfig, SpecConfigError
from spec_plugin.commands.check import judge_run
from spec_plugin.methods.checkpoints import tensor_names, vocabulary_map
from spec_plugin.methods.frozen import kind_of
from spec_plugin.plan.arguments import read_config, split_arguments
from spec_plugin.plan.run_plan import Model

OURS = (DraftConfigError, CheckpointError, SpecConfigError)
MANY = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
FEWER = settings(MANY, max_examples=30)
DRAFT = DraftConfig.from_target(TARGET, draft_vocab_size=32).to_hf()

numbers = st.one_of(
    st.integers(),
    st.integers(min_value=2**31, max_value=10**60),
    st.floats(),
    st.booleans(),
    st.sampled_from([0, 1, 2, 3, -1, 2**31, 2**63, 1e308, 0.5]),
)
values = st.recursive(
    st.one_of(st.none(), numbers, st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
rope = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["linear", "llama3", "default", "yarn"]) | values},
    optional={
        name: values
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "rope_theta")
    },
)


def spoilt(config: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A config.json in which some fields say something else, or nothing."""
    changes = st.dictionaries(st.sampled_from(sorted({*config, "sliding_window", "eagle_config"})), values, max_size=4)
    scaled = st.fixed_dictionaries({}, optional={"rope_scaling": rope, "rope_parameters": rope})
    gone = st.sets(st.sampled_from(sorted(config)), max_size=2)
    return st.builds(
        lambda told, rope, less: {k: v for k, v in {**config, **told, **rope}.items() if k not in less},
        changes,
        scaled,
        gone,
    )


def answered(call: Callable[[], Any]) -> Any:
    """What it returns, or an error of our own, which says something and not too much."""
    try:
        return call()
    except OURS as error:
        assert 10 < len(str(error)) < 3000, error
        return None


@MANY
@given(spoilt({**TARGET, "tie_word_embeddings": False}))
def test_any_target_is_parsed_or_refused(config: dict[str, Any]) -> None:
    made = answered(lambda: DraftConfig.from_target(config))
    if made is not None:
        assert made.parameters < 1 << 34 and made.head_dim > 1 and made.rope.theta > 0
        validate_draft(made, config)
        assert DraftConfig.from_hf(json.loads(json.dumps(made.to_hf()))) == made
    answered(lambda: SmallLmShape.from_target(config))


@MANY
@given(spoilt(DRAFT))
def test_any_config_of_a_draft_is_parsed_or_refused(config: dict[str, Any]) -> None:
    made = answered(lambda: DraftConfig.from_hf(config, target_layers=8))
    if made is not None:
        assert 0 < made.draft_vocab_size <= made.vocab_size and made.parameters > 0
        answered(lambda: validate_draft(made, TARGET))


@FEWER
@given(values | spoilt({**TARGET, "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}))
def test_any_target_with_a_layer_of_its_own_is_parsed_or_refused(config: Any) -> None:
    made = answered(lambda: MtpShape.from_target(config if isinstance(config, dict) else {"a": config}))
    if made is not None:
        assert made.parameters > 0 and len(made.layer.heads) == 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole pruned draft."""
    place = tmp_path_factory.mktemp("draft")
    config = DraftConfig.from_target(TARGET, draft_vocab_size=32)
    (place / "config.json").write_text(json.dumps(config.to_hf()))
    save_file(draft_tensors(config), place / "model.safetensors")
    return place


@MANY
@given(text=st.binary(max_size=64) | values.map(lambda v: json.dumps(v).encode()))
@example(text=b"{" + b"[" * 100_000)
@example(text=b'{"vocab_size": ' + b"9" * 5000 + b"}")
def test_any_bytes_are_a_config_json_or_an_error_of_ours(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    place = tmp_path_factory.getbasetemp() / "any"
    place.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors.index.json"):
        (place / name).write_bytes(text)
    for read in (lambda: read_json(place / "config.json"), lambda: places(place), lambda: kind_of(place)):
        answered(read)
    answered(lambda: load_draft(place, TARGET))


def read_all(place: Path) -> None:
    """Each way in which a file of tensors is read."""
    file = place / "model.safetensors"
    found = answered(lambda: load_draft(place, TARGET))
    if found is not None:
        ids = torch.arange(32) + found[1]["d2t"]
        assert all(bool(t.isfinite().all()) for t in found[1].values()) and 0 <= int(ids.min()) <= int(ids.max()) < 64
    for read in (lambda: read_tensors(file), lambda: refuse_broken(file), lambda: tensor_names(place)):
        answered(read)
    answered(lambda: vocabulary_map(place))


header_numbers = st.integers(min_value=-(2**63), max_value=2**65) | st.sampled_from([0, 1, 8, 32, 128, 2**40])
header_values = st.one_of(
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BF16", "F64", "I64", "U8", "BOOL", "F8_E4M3", "F4", "U64", "C64", "x"])
            | values,
            "shape": st.lists(header_numbers, max_size=3) | values,
            "data_offsets": st.lists(header_numbers, min_size=2, max_size=2) | values,
        }
    ),
    values,
)


@FEWER
@given(data=st.data())
def test_any_header_of_a_safetensors_file_is_read_or_refused(folder: Path, tmp_path_factory: Any, data: Any) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    for name in data.draw(st.lists(st.sampled_from(sorted(header)), max_size=2)):
        change = data.draw(header_values)
        keep = isinstance(change, dict) and data.draw(st.booleans())
        header[name] = {**header[name], **change} if keep and isinstance(header[name], dict) else change
    told = json.dumps(header).encode()
    place = tmp_path_factory.getbasetemp() / "headers"
    place.mkdir(exist_ok=True)
    (place / "config.json").write_bytes((folder / "config.json").read_bytes())
    (place / "model.safetensors").write_bytes(struct.pack("<Q", len(told)) + told + whole[8 + length :])
    read_all(place)


@MANY
@given(
    cut=st.integers(min_value=0, max_value=2**20),
    changes=st.lists(st.tuples(st.integers(min_value=0, max_value=2**20), st.integers(0, 255)), max_size=4),
    head=st.booleans(),
)
def test_any_bytes_of_a_safetensors_file_are_read_or_refused(
    folder: Path, tmp_path_factory: Any, cut: int, changes: list[tuple[int, int]], head: bool
) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    for at, byte in changes:
        content[at % (2048 if head else len(content))] = byte
    place = tmp_path_factory.getbasetemp() / "bytes"
    place.mkdir(exist_ok=True)
    (place / "config.json").write_bytes((folder / "config.json").read_bytes())
    (place / "model.safetensors").write_bytes(content[: cut if cut % 3 else None])
    read_all(place)


@MANY
@given(st.dictionaries(st.sampled_from(sorted(SpecConfig.model_fields)) | st.text(max_size=8), values, max_size=4))
def test_any_options_are_parsed_or_refused(options: dict[str, Any]) -> None:
    found = answered(lambda: SpecConfig.parse(options))
    if found is not None:
        assert all(not math.isnan(v) for v in found.model_dump().values() if isinstance(v, float))
    answered(lambda: verl.read_config(SimpleNamespace(custom={"spec": options})))


@FEWER
@given(
    st.lists(
        st.sampled_from(["--spec.enable", "--spec.k", "--spec.", "=", "--x", "3", "false", "--spec.enable="])
        | st.text(max_size=6)
    )
)
def test_any_command_line_is_split_or_refused(arguments: list[str]) -> None:
    found = answered(lambda: split_arguments(arguments))
    if found is not None:
        assert [a for a in found[0] if a.startswith("--spec.")] == []
        answered(lambda: read_config({k: v for k, v in found[1].items() if k != "enable"}))


@FEWER
@given(values)
def test_whatever_stands_under_custom_is_parsed_or_refused(custom: Any) -> None:
    answered(lambda: verl.read_config(SimpleNamespace(custom=custom)))


flags = [name for action in openrlhf_options._parser()._actions for name in action.option_strings]


@FEWER
@given(
    st.lists(
        st.sampled_from([*flags, "--spec.k", "--spec.enable=off"]) | st.sampled_from(["x", "-1", "0", "nan", "="]),
        max_size=8,
    )
)
def test_any_flags_of_openrlhf_are_judged(given: list[str]) -> None:
    try:
        found = judge_run("openrlhf", given, lambda name: Model(name, TARGET, "x"))
    except SpecConfigError as error:  # a program in the place of flags is no run to judge
        assert "what this program starts is not read" in str(error) and not given[0].startswith("-")
        return
    assert all(str(objection) for objection in found.objections)
