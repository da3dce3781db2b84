"""Law 8: no draft brings code, whatever the policy is trusted with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from spec_plugin_conformance.tiny import tiny_config

from draft_training.files import CODE, without_code
from spec_plugin import SpecConfig, SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.lifecycle.manager import built_in_method, create_manager, method_of

EVIL = """
from pathlib import Path
from transformers import PretrainedConfig

Path(__file__ + ".ran").write_text("it ran")
Path({marker!r}).write_text("it ran")


class EvilConfig(PretrainedConfig):
    model_type = "evil"
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small causal LM that any target of the same vocabulary may draft with."""
    from transformers import Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("draft")
    Qwen3ForCausalLM(tiny_config(num_hidden_layers=1)).float().save_pretrained(folder)
    return folder


@pytest.fixture
def draft(whole: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "draft"
    shutil.copytree(whole, folder)
    (folder / "evil.py").write_text("raise SystemExit")
    return folder


def poison(folder: Path, file: str, value: dict[str, Any]) -> None:
    path = folder / file
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(config | value))


def target() -> TargetInfo:
    return TargetInfo(path="/the/policy", hf_config=tiny_config().to_dict(), dtype="float32")


METHODS = [
    {"method": "frozen", "train": False},
    {"method": "draft_model"},
    {"method": "draft_model", "train": False},
    {"method": "eagle3", "train": False},
]
POISONS = [
    ("config.json", {"auto_map": {"AutoConfig": "evil.EvilConfig"}}),
    ("config.json", {"auto_map": {"AutoConfig": "someone/repo--evil.EvilConfig"}}),
    ("config.json", {"custom_pipelines": {"text-generation": {"impl": "evil.Pipe"}}}),
    ("config.json", {"text_config": {"auto_map": {"AutoModel": "evil.Model"}}}),
    ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.Tok", None]}}),
    ("processor_config.json", {"auto_map": {"AutoProcessor": "evil.P"}}),
]


@pytest.mark.parametrize(
    "options", METHODS, ids=lambda o: f"{o['method']}{'' if o.get('train', True) else ' as it is'}"
)
@pytest.mark.parametrize(("file", "value"), POISONS)
def test_law_8_a_draft_that_names_code_is_refused_by_every_method_in_check_and_in_the_run(options, file, value, draft):
    poison(draft, file, value)
    config = SpecConfig(draft=str(draft), **options)
    for ask in (
        lambda: built_in_method(config, target()),
        lambda: method_of(config, target(), create_manager(load_entry_points=False)),
    ):
        with pytest.raises(SpecConfigError, match=rf"{file} names code to run, ({'|'.join(CODE)})="):
            ask()


def test_a_draft_without_code_is_taken(draft):
    assert built_in_method(SpecConfig(draft=str(draft), method="frozen", train=False), target()) is not None


def test_law_8_an_auto_map_of_no_file_that_is_here_is_dropped(draft):
    """speculators saves each draft with one of its own; what vLLM reads no longer has it."""
    (draft / "evil.py").unlink()
    poison(draft, "config.json", {"auto_map": {"": "evil.EvilConfig"}})
    config = SpecConfig(draft=str(draft), method="frozen", train=False)
    served = Path(built_in_method(config, target()).speculative_config()["model"])
    assert served != draft and "auto_map" not in (served / "config.json").read_text()
    assert (served / "model.safetensors").read_bytes() == (draft / "model.safetensors").read_bytes()
    assert method_of(
        SpecConfig(draft=str(draft), method="draft_model"), target(), create_manager(load_entry_points=False)
    ).draft
    for there in ("someone/repo--evil.EvilConfig", ["evil.Tok", None]):
        poison(draft, "config.json", {"auto_map": {"": there}})
        with pytest.raises(SpecConfigError, match="names code to run"):
            built_in_method(config, target())


def test_the_policys_own_folder_is_trusted_as_the_policy_is(draft):
    """Its layers may be drafted with, and vLLM runs its code for the policy, or does not."""
    poison(draft, *POISONS[0])
    own = TargetInfo(path=str(draft), hf_config=tiny_config().to_dict(), dtype="float32")
    assert built_in_method(SpecConfig(draft=str(draft), method="frozen", train=False), own) is not None


def test_law_8_what_is_served_names_no_code_either(draft, tmp_path, monkeypatch):
    from draft_training.small_lm_module import SmallLmKind, load_small_lm

    poison(draft, *POISONS[1])
    shape, tensors = load_small_lm(draft, tiny_config().to_dict())
    (tmp_path / "served").mkdir()
    SmallLmKind(shape).write(tmp_path / "served", tensors)
    assert "auto_map" not in (tmp_path / "served" / "config.json").read_text()
    assert without_code({"a": 1, "b": {"auto_map": 1, "c": {"custom_pipelines": 2}}}) == {"a": 1, "b": {"c": {}}}


def test_law_8_vllm_would_run_it(draft, tmp_path):
    """By the policy's own ``trust_remote_code``; when this fails, vLLM has learned to ask for a draft separately."""
    pytest.importorskip("vllm")
    from vllm.transformers_utils.config import get_config

    marker = tmp_path / "marker"
    (draft / "evil.py").write_text(EVIL.replace("{marker!r}", repr(str(marker))))
    poison(draft, "config.json", {"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig"}})
    get_config(str(draft), trust_remote_code=True)
    assert marker.exists()
    marker.unlink()
    with pytest.raises(SpecConfigError, match="names code to run"):
        built_in_method(SpecConfig(draft=str(draft), method="frozen", train=False), target())
    assert not marker.exists()
