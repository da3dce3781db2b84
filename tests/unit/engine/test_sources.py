"""What is read in vLLM's sources; the installed ones, and pieces of other releases."""

from __future__ import annotations

import inspect
from importlib.util import find_spec

import pytest

from spec_plugin import SpecConfig, SpecConfigError, sources
from spec_plugin.builtin.methods.eagle3 import Eagle3Method
from spec_plugin.conformance.tiny import tiny_config
from spec_plugin.events import TargetInfo

LOADER, CONFIG = "v1/worker/gpu/spec_decode/eagle/utils.py", "config/vllm.py"
IN_0_29 = """
def load_eagle_model(target_model, vllm_config):
    return get_model(vllm_config=vllm_config, model_config=draft_model_config)
"""
IN_0_33 = """
def load_eagle_model(target_model, vllm_config):
    load_config = speculative_config.draft_load_config
    return get_model(vllm_config=vllm_config, model_config=draft_model_config, load_config=load_config)
"""
V1_ONLY = 'unsupported.append("dynamic speculative decoding")'


@pytest.fixture
def installed(monkeypatch):
    """Another vLLM's sources, by file."""
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    files = {LOADER: IN_0_29, CONFIG: ""}
    monkeypatch.setattr(sources, "source_of", lambda package, file: files[file] if package == "vllm" else "")
    return files


def configure(vocabulary: int | None, load_format: str = "dummy", device_type: str = "cuda") -> None:
    target = TargetInfo("", tiny_config().to_dict(), "bfloat16", device_type=device_type, load_format=load_format)
    Eagle3Method().spec_method(SpecConfig(draft_vocab_size=vocabulary), target)


def test_a_head_that_would_be_dropped_is_refused_with_what_to_set(installed):
    with pytest.raises(SpecConfigError, match=r"64 of 320 tokens.*load_format to auto.*VLLM_USE_V2_MODEL_RUNNER=0"):
        configure(64)


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        ("the head is the target's anyway", {"vocabulary": None}),
        ("the draft's file is read", {"vocabulary": 64, "load_format": "auto"}),
        ("a CPU has V1", {"vocabulary": 64, "device_type": "cpu"}),
    ],
)
def test_a_run_that_loses_nothing_is_not_refused(installed, what, arguments):
    configure(**arguments)


@pytest.mark.parametrize(("file", "text"), [(LOADER, IN_0_33), (CONFIG, V1_ONLY), (LOADER, "")])
def test_other_releases_are_not_refused(installed, file, text):
    installed[file] = text
    configure(64)


def test_v1_on_request_is_not_refused(installed, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    configure(64)


@pytest.mark.skipif(not find_spec("vllm"), reason="needs vLLM")
def test_the_installed_sources_say_what_the_imported_functions_do():
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model

    ignored = "draft_load_config" not in inspect.getsource(load_eagle_model)
    assert sources.loads_drafts_like_targets() == ignored
    assert sources.v2_takes_every_k() == ("dynamic speculative decoding" not in inspect.getsource(VllmConfig))
