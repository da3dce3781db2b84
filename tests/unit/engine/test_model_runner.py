"""Which model runner an engine gets, read in vLLM's sources; the installed ones, and pieces of other releases."""

from __future__ import annotations

import inspect
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from builders.paths import ROOT
from spec_plugin_conformance.tiny import tiny_config

from spec_plugin import SpecConfig, SpecConfigError
from spec_plugin.api.events import TargetInfo
from spec_plugin.methods.eagle3 import Eagle3Method
from spec_plugin.plan import model_runner
from spec_plugin.plan.model_runner import METHODS, runner_of

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
GATE = """
class VllmConfig:
    def _get_v2_model_runner_unsupported_features(self):
        if speculative_config.method in ("ngram", "ngram_gpu"):
            unsupported.append("ngram/ngram_gpu speculative decoding")
        elif speculative_config.method not in ("eagle", "eagle3", "mtp", "dflash", "dspark", "extract_hidden_states"):
            unsupported.append("speculative method")
        if speculative_config.parallel_drafting and speculative_config.method not in ("dflash", "dspark"):
            unsupported.append("parallel drafting")
"""
V1_ONLY = 'unsupported.append("dynamic speculative decoding")'
ON_V1 = {"draft_model", "suffix", "ngram", "frozen: P-EAGLE", "frozen: a causal LM"}


@pytest.fixture
def installed(monkeypatch):
    """Another vLLM's sources, by file, and a Triton for cards."""
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    files = {LOADER: IN_0_29, CONFIG: GATE}
    monkeypatch.setattr(model_runner, "source_of", lambda package, file: files[file] if package == "vllm" else "")
    monkeypatch.setattr(model_runner, "folder_of", lambda package: Path("/nowhere"))
    monkeypatch.setattr(model_runner, "entry_points", lambda group: [])
    return files


def v1_methods(device_type: str = "cuda") -> set[str]:
    return {name for name, settings in METHODS.items() if not runner_of(settings, device_type).v2}


def configure(
    vocabulary: int | None, load_format: str = "dummy", device_type: str = "cuda", of_the_target: int = 320
) -> int:
    hf = tiny_config().to_dict() | {"vocab_size": of_the_target}
    target = TargetInfo("", hf, "bfloat16", device_type=device_type, load_format=load_format)
    method = Eagle3Method().spec_method(SpecConfig(draft_vocab_size=vocabulary), target)
    assert method is not None and method.draft is not None
    return method.draft.config.draft_vocab_size


def test_a_head_that_would_be_dropped_is_refused_with_what_to_set(installed):
    with pytest.raises(SpecConfigError, match=r"64 of 320 tokens.*load_format to auto.*VLLM_USE_V2_MODEL_RUNNER=0"):
        configure(64)


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        ("the head is the target's anyway", {"vocabulary": None}),
        ("the draft's file is read", {"vocabulary": 64, "load_format": "auto"}),
        ("a CPU without a Triton for it has V1", {"vocabulary": 64, "device_type": "cpu"}),
    ],
)
def test_a_run_that_loses_nothing_is_not_refused(installed, what, arguments):
    configure(**arguments)


def test_unasked_a_vocabulary_is_pruned_only_where_the_engine_reads_the_drafts_file(installed):
    large = 1 << 17
    assert configure(None, "auto", of_the_target=large) < large // 2
    assert configure(None, "dummy", device_type="cpu", of_the_target=large) < large // 2
    assert configure(None, "dummy", of_the_target=large) == large
    assert configure(large, "auto", of_the_target=large) == large, "all of them, where a user says so"


@pytest.mark.parametrize(("file", "text"), [(LOADER, IN_0_33), (CONFIG, V1_ONLY), (LOADER, "")])
def test_other_releases_are_not_refused(installed, file, text):
    installed[file] = text
    configure(64)


def test_v1_on_request_is_not_refused(installed, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    configure(64)
    assert v1_methods() == set(METHODS)


def test_what_v2_lacks_falls_back_to_v1_and_why_is_said(installed):
    assert v1_methods() == ON_V1
    assert "the method draft_model" in runner_of(METHODS["draft_model"], "cuda").words
    assert "P-EAGLE" in runner_of(METHODS["frozen: P-EAGLE"], "cuda").words


def test_asked_for_by_name_v2_is_refused_where_vllm_would_not_start(installed, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert {name for name, settings in METHODS.items() if runner_of(settings, "cuda").refused} == ON_V1
    assert "vLLM will refuse to start" in runner_of(METHODS["suffix"], "cuda").words


def test_a_vllm_whose_v2_takes_no_k_that_changes_serves_v1(installed):
    installed[CONFIG] = GATE + V1_ONLY
    assert v1_methods() == set(METHODS)


def test_a_vllm_that_lists_no_methods_is_believed_to_take_v2(installed):
    installed[CONFIG] = ""
    assert not v1_methods()


def test_a_cpu_has_v2_with_a_triton_for_it(installed, tmp_path, monkeypatch):
    assert v1_methods("cpu") == set(METHODS)
    (tmp_path / "backends" / "cpu").mkdir(parents=True)
    monkeypatch.setattr(model_runner, "folder_of", lambda package: tmp_path)
    assert v1_methods("cpu") == ON_V1


@pytest.mark.skipif(not find_spec("vllm"), reason="needs vLLM")
def test_the_installed_sources_say_what_the_imported_functions_do():
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model

    ignored = "draft_load_config" not in inspect.getsource(load_eagle_model)
    assert model_runner.loads_drafts_like_targets() == ignored
    assert model_runner.v2_takes_every_k() == ("dynamic speculative decoding" not in inspect.getsource(VllmConfig))


@pytest.mark.skipif(not find_spec("vllm"), reason="needs vLLM")
def test_the_installed_vllm_answers_as_its_own_function_for_each_method(monkeypatch):
    from types import SimpleNamespace

    from vllm.config import CompilationMode, VllmConfig

    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "distributed_executor_backend": "mp"}
    for name, settings in METHODS.items():
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(mode=CompilationMode.NONE, pass_config=SimpleNamespace(enable_sp=False)),
            parallel_config=SimpleNamespace(**parallel, enable_dbo=False, enable_elastic_ep=False),
            cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
            model_config=None,
            speculative_config=SimpleNamespace(**{"parallel_drafting": False, **settings}),
        )
        lacks = VllmConfig._get_v2_model_runner_unsupported_features(config)
        assert bool(lacks) == (not runner_of(settings, "cuda").v2), (name, lacks)


@pytest.mark.skipif(not find_spec("vllm"), reason="needs vLLM")
def test_the_documents_table_of_runners_is_what_the_installed_vllm_says(monkeypatch):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    text = (ROOT / "docs" / "support" / "shapes.md").read_text()
    rows = re.findall(r"^\| `(\w+)`(: [^|]+?)? \| (V1|V2) \|", text, re.M)
    written = {name + rest: runner for name, rest, runner in rows}
    assert written == {name: "V2" if runner_of(s, "cuda").v2 else "V1" for name, s in METHODS.items()}
