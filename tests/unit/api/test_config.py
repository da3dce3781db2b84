from __future__ import annotations

import pytest
from pydantic import ValidationError

from spec_plugin import SpecConfig, SpecConfigError
from spec_plugin.api.config import describe_range, options_table

PREFIX = "+actor_rollout_ref.rollout.custom.spec."


def refusal(**raw: object) -> str:
    with pytest.raises(SpecConfigError) as caught:
        SpecConfig.parse(raw, PREFIX)
    return str(caught.value)


def test_no_option_is_needed():
    assert SpecConfig.parse(None) == SpecConfig.parse({}) == SpecConfig()


def test_an_unknown_option_is_answered_with_its_value_and_the_nearest_spelling():
    message = refusal(trian_share=0.2)
    assert f"{PREFIX}trian_share=0.2" in message
    assert f"did you mean {PREFIX}train_share?" in message


def test_an_unknown_option_that_resembles_none_is_answered_with_all_of_them():
    message = refusal(zzz=1)
    assert all(name in message for name in SpecConfig.model_fields)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("k", "many", "int >= 1 and <= 16"),
        ("k", 17, "int >= 1 and <= 16"),
        ("k", 0, "int >= 1 and <= 16"),
        ("k", None, "int >= 1 and <= 16"),
        ("lr", 0.0, "float > 0 and <= 1"),
        ("train", "perhaps", "true | false"),
        ("serve", "sometimes", "auto | always | never"),
        ("draft_sample_method", "synthetic", "auto | greedy | probabilistic"),
        ("aux_layers", ["two"], "list or none"),
    ],
)
def test_a_bad_value_is_answered_with_option_value_and_allowed_range(name, value, allowed):
    message = refusal(**{name: value})
    shown = value[0] if isinstance(value, list) else value
    assert f"{PREFIX}{name}={shown!r}" in message
    assert f"allowed: {allowed}" in message


def test_several_bad_options_are_all_named_at_once():
    message = refusal(k=99, lr=-1.0, swerve="auto")
    assert all(f"{PREFIX}{part}" in message for part in ("k=99", "lr=-1.0", "swerve='auto'", "serve?"))


def test_a_parsed_config_cannot_be_changed():
    with pytest.raises(ValidationError):
        SpecConfig().k = 5  # type: ignore[misc]


def test_text_from_a_command_line_becomes_the_declared_type():
    config = SpecConfig.parse({"k": "5", "train": "false", "aux_layers": ["1", "4"], "block": ["metrics"]})
    assert (config.k, config.train, config.aux_layers, config.block) == (5, False, (1, 4), ("metrics",))


@pytest.mark.parametrize("name", list(SpecConfig.model_fields))
def test_every_option_has_a_meaning_a_range_and_a_default_within_it(name):
    field = SpecConfig.model_fields[name]
    assert field.description and describe_range(name)
    assert getattr(SpecConfig.parse({name: field.default}), name) == field.default


def test_the_options_table_has_one_row_for_each_option():
    rows = options_table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(SpecConfig.model_fields)
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)
