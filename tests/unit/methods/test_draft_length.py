"""A draft reads texts as long as the engine's, whatever stretches them, and outlives the engine's sleep."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders.bad_input import TARGET, draft_in
from builders.frozen import HF, config_of, tensors_of
from safetensors.torch import save_file

from draft_training.rope import derived_length
from spec_plugin import SpecConfig, SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.api.method import Method
from spec_plugin.lifecycle.manager import built_in_method, create_manager, method_of

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
#: ways in which a target of 64 positions serves texts of 128
STRETCHED: dict[str, dict[str, Any]] = {
    "yarn": {"rope_parameters": YARN},
    "yarn, added to another": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": YARN},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "by the engine alone": {},
}


def info(hf: dict[str, Any], length: int | None = None) -> TargetInfo:
    return TargetInfo("/the/policy", hf, "float32", max_num_seqs=8, max_model_len=length)


def of_the_run(target: TargetInfo, **options: Any) -> Method:
    return method_of(SpecConfig.parse(options), target, create_manager((), (), load_entry_points=False))


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
@pytest.mark.parametrize("how", STRETCHED)
def test_a_draft_that_is_born_is_as_long_as_the_engine(how: str, method: str) -> None:
    target = info({**TARGET, **STRETCHED[how]}, None if STRETCHED[how] else 128)
    assert target.length == 128
    (_, reads) = derived_length(of_the_run(target, method=method).draft.config.to_hf())
    assert reads >= 128


def test_a_draft_is_no_longer_than_it_must_be() -> None:
    """Its table of rotary angles grows with its positions."""
    for rope in ({}, STRETCHED["yarn"], STRETCHED["linear"]):
        made = of_the_run(info({**TARGET, **rope}), method="eagle3").draft.config
        assert made.max_position_embeddings == TARGET["max_position_embeddings"]
    linear = of_the_run(info({**TARGET, **STRETCHED["linear"]}, 200), method="eagle3").draft.config
    assert linear.max_position_embeddings == 100 and linear.rope.type == "linear"


def test_a_draft_is_plain_where_the_targets_rope_ends_before_the_engines_texts() -> None:
    made = of_the_run(info({**TARGET, **STRETCHED["yarn"]}, 256), method="eagle3").draft.config
    assert (made.rope.type, made.max_position_embeddings) == ("default", 256)


@pytest.mark.parametrize("method", ["eagle3", "frozen"])
def test_a_draft_that_is_given_and_shorter_than_the_engine_is_refused(tmp_path: Path, method: str) -> None:
    """Of vLLM's V1 one long text ends drafting for the whole batch; trained or served as it is, in ``check`` and in the run."""
    folder = str(draft_in(tmp_path / "draft"))
    options = {"method": method, "draft": folder, **({"train": False} if method == "frozen" else {})}
    for target in (info(TARGET, 65), info({**TARGET, **STRETCHED["yarn"]}), info({**TARGET, **STRETCHED["dynamic"]})):
        for ask in (of_the_run, lambda t, **o: built_in_method(SpecConfig.parse(o), t)):
            with pytest.raises(SpecConfigError, match=r"texts of 64 tokens .*shorter than the engine's texts of"):
                ask(target, **options)
    assert of_the_run(info(TARGET, 64), **options).pretrained
    assert of_the_run(info({**TARGET, "max_position_embeddings": 4096}, 64), **options).pretrained, (
        "the run's own texts count"
    )


def test_a_frozen_draft_that_does_not_say_is_read_as_llamas_class_is(tmp_path: Path) -> None:
    said = {name: value for name, value in config_of("eagle3").items() if name != "max_position_embeddings"}
    (tmp_path / "config.json").write_text(json.dumps(said))
    save_file(tensors_of("eagle3"), tmp_path / "model.safetensors")
    options = {"method": "frozen", "draft": str(tmp_path), "train": False}
    assert of_the_run(info(HF, 2048), **options).draft_config["max_position_embeddings"] == 2048
    with pytest.raises(SpecConfigError, match="texts of 2048 tokens"):
        of_the_run(info({**HF, "max_position_embeddings": 4096}), **options)


MTP = {**TARGET, "architectures": ["GlmForCausalLM"], "num_nextn_predict_layers": 1}


def test_a_layer_of_the_target_is_as_long_as_its_own_file_says() -> None:
    """vLLM reads it from there, without the ``hf_overrides`` that stretch the policy."""
    asked = {"method": "mtp", "train": False}
    assert of_the_run(info(MTP, 64), **asked).pretrained
    with pytest.raises(SpecConfigError, match=r"the target's own layer, .*texts of 64 tokens"):
        of_the_run(info(MTP, 128), **asked)


def test_a_draft_that_no_refresh_brings_back_is_not_dropped(tmp_path: Path) -> None:
    """Not that which the target brings either: no weight sync of a trainer knows it."""
    frozen = {"method": "frozen", "draft": str(draft_in(tmp_path / "draft")), "train": False}
    for target, asked in ((info(TARGET), frozen), (info(MTP), {"method": "mtp", "train": False})):
        with pytest.raises(SpecConfigError, match=r"spec\.sleep_level=2: .*no refresh brings back"):
            of_the_run(target, **asked, sleep_level=2)
        assert of_the_run(target, **asked).pretrained
    for method in ("eagle3", "ngram", "suffix"):
        assert of_the_run(info(TARGET), method=method, sleep_level=2)


def test_a_checkpoint_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """transformers, and so the actor, loads the single file; vLLM what the index names."""
    (tmp_path / "model.safetensors").touch()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    target = replace(info(TARGET), path=str(tmp_path))
    with pytest.raises(SpecConfigError, match=r"model\.safetensors lies beside model\.safetensors\.index\.json"):
        of_the_run(target, method="ngram")
    with pytest.raises(SpecConfigError, match=r"^the target .* is refused") as refused:
        of_the_run(target, method="auto")
    assert str(refused.value).count("lies beside") == 1, "said once, not for each method that could be chosen"
    assert of_the_run(replace(target, load_format="dummy"), method="ngram"), "the trainer sends all weights"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert of_the_run(target, method="ngram")
