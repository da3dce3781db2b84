"""The parts of OpenRLHF's CPU support that need neither OpenRLHF nor an engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from spec_plugin_conformance.tiny import VOCAB, tiny_config
from spec_plugin_cpu import MAX_NUM_SEQS
from spec_plugin_openrlhf_cpu import chosen, patch_vllm, setup_worker, shims
from transformers import Qwen3ForCausalLM

from spec_plugin.api.errors import PatchError


def a_library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("a_library")

    def greet(name: str) -> str:
        return f"hello {name}"

    module.greet = greet  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_library", module)
    return module


def test_a_symbol_is_replaced_once_and_its_original_can_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    library = a_library(monkeypatch)
    for _ in range(2):
        shims.replace("a_library", "greet", lambda original: lambda name: original(name) + "!", ("name",), ("hello",))
    assert library.greet("you") == "hello you!"


@pytest.mark.parametrize(
    ("path", "parameters", "landmarks", "message"),
    [
        ("wave", (), (), "a_library:wave is gone"),
        ("greet", ("person",), (), "takes \\('name',\\)"),
        ("greet", ("name",), ("goodbye",), "no longer contains \\['goodbye'\\]"),
    ],
)
def test_a_symbol_that_changed_is_an_error_and_stays(
    monkeypatch: pytest.MonkeyPatch, path: str, parameters: tuple[str], landmarks: tuple[str], message: str
) -> None:
    library = a_library(monkeypatch)
    before = library.greet
    with pytest.raises(PatchError, match=message):
        shims.replace("a_library", path, lambda original: lambda name: "", parameters, landmarks)
    assert library.greet is before


def test_law_1_without_deepspeeds_switch_nothing_is_imported_or_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    before = torch.cuda.current_device
    patch_vllm()
    setup_worker()
    assert not chosen() and torch.cuda.current_device is before
    check = "import sys, spec_plugin_openrlhf_cpu as p; p.patch_vllm(); print({'torch', 'ray', 'openrlhf'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", check], text=True, capture_output=True, check=True)
    assert done.stdout.strip() == "set()"


def test_each_name_of_torch_cuda_gets_an_object_of_its_own() -> None:
    """One under two names is refused by dynamo, when something first imports it."""
    assert len({id(f) for f in shims._CUDA.values()}) == len(shims._CUDA)
    device = shims._CUDA["current_device"]()
    assert torch.zeros(1).to(device).device.type == "cpu" and f"cuda:{device}" == "cuda:0"


def test_padding_comes_back_where_it_was() -> None:
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    values = torch.arange(16.0).reshape(2, 4, 2) * mask.unsqueeze(-1)
    packed, indices, borders, longest, lengths = shims.unpad_input(values, mask)
    assert packed.shape == (5, 2) and borders.tolist() == [0, 3, 5] and longest == 3 and lengths.tolist() == [3, 2]
    assert torch.equal(shims.pad_input(packed, indices, 2, 4), values)
    assert torch.equal(shims.index_first_axis(values.flatten(0, 1), indices), packed)


def test_packed_documents_do_not_see_each_other_with_sdpa() -> None:
    """What the replacement of flash_attention_2 rests on: position ids alone keep documents apart."""
    torch.manual_seed(0)
    config = tiny_config(num_hidden_layers=2, use_cache=False, attn_implementation="sdpa")
    model = Qwen3ForCausalLM(config).eval()
    documents = [torch.randint(VOCAB, (1, length)) for length in (5, 3, 7)]
    positions = torch.cat([torch.arange(d.shape[1]) for d in documents]).unsqueeze(0)
    with torch.no_grad():
        packed = model(torch.cat(documents, dim=1), position_ids=positions, attention_mask=None).logits
        alone = torch.cat([model(d).logits for d in documents], dim=1)
        mixed = model(torch.cat(documents, dim=1)).logits
    assert torch.allclose(packed, alone, atol=1e-5)
    assert not torch.allclose(mixed, alone, atol=1e-3)


ENGINE_SCRIPT = """
from spec_plugin_openrlhf_cpu import engine
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

tokens, requests = engine._fewer_at_once(EngineArgs.get_batch_defaults)(None, 1)
assert tokens == EngineArgs.get_batch_defaults(1)[0], tokens
assert requests[UsageContext.ENGINE_CONTEXT] == 5, requests  # that of AsyncLLM: vLLM has no default of its own for it
"""


@pytest.mark.skipif(not find_spec("vllm"), reason="needs vLLM")
def test_an_engine_runs_as_many_requests_at_once_as_the_variable_says(
    warm_run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    environment = {**os.environ, MAX_NUM_SEQS: "5"}
    done = warm_run("-c", ENGINE_SCRIPT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
