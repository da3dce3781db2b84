"""vLLM's V2 model runner on a CPU: inert until it is chosen, in time or not at all, and loud where Triton or vLLM has changed."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from spec_plugin_cpu import v2_runner
from spec_plugin_cpu.v2_runner import RunnerError, vllm_parts

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
SCRIPT = """
import spec_plugin_cpu.v2_runner.in_force
import importlib.metadata, os, sys
assert "spec_plugin" not in sys.modules  # law 1: trainers without the flag run in such processes, too
if not os.environ["SPEC_PLUGIN_CPU_RUNNER"]:
    assert "triton" not in sys.modules and "TRITON_INTERPRET" not in os.environ
    assert not hasattr(importlib.metadata.version, "_spec_plugin_cpu") and len(sys.meta_path) == META
    raise SystemExit
assert "cpu" in importlib.metadata.version("vllm")
from vllm.triton_utils import HAS_TRITON
import vllm.v1.sample.ops.topk_topp_sampler as filters
assert HAS_TRITON and not filters.HAS_TRITON
import numpy, torch, triton, triton.language as tl
from triton.language.extra import libdevice
@triton.jit
def kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, libdevice.log1p(tl.load(x + at, mask=at < n)), mask=at < n)
x, out = torch.rand(5), torch.zeros(8)
kernel[(1,)](x, out, 5, BLOCK=8)
assert torch.allclose(out[:5], x.log1p()) and not out[5:].any()
"""


def in_a_process(runner: str) -> None:
    script = SCRIPT.replace("META", str(len([f for f in sys.meta_path if "_pytest" not in type(f).__module__])))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, v2_runner.SWITCH: runner, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_law_1_without_the_variable_nothing_changes():
    in_a_process("")


@pytest.mark.skipif(not find_spec("vllm"), reason="needs vLLM")
def test_kernels_run_in_the_interpreter():
    in_a_process(v2_runner.V2_ASYNC)


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv(v2_runner.SWITCH, "v3")
    with pytest.raises(ValueError, match="expected v2, v2-async or nothing"):
        v2_runner.chosen()


@pytest.mark.parametrize("early", ["triton", "vllm.platforms", "vllm.triton_utils"])
def test_what_was_imported_before_is_named(monkeypatch, early):
    monkeypatch.delitem(sys.modules, f"{v2_runner.__name__}.interpreter", raising=False)
    monkeypatch.setitem(sys.modules, early, sys)
    with pytest.raises(RunnerError, match=r"is imported already: import spec_plugin_cpu\.v2_runner\.in_force before"):
        v2_runner.serve_v2_on_cpu(asynchronous=False)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ


def test_a_triton_that_has_changed_is_refused_by_the_symbols_name():
    from spec_plugin_cpu.v2_runner import interpreter

    with pytest.raises(RunnerError, match=r"interpreter\.no_such is gone"):
        interpreter._expect(interpreter.interpreter, "no_such")
    with pytest.raises(RunnerError, match=r"_patch_lang no longer contains 'nothing like it'"):
        interpreter._expect(interpreter.interpreter, "_patch_lang", "nothing like it")


def test_another_build_of_vllm_is_refused(monkeypatch):
    def gone(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", gone)
    with pytest.raises(RunnerError, match="for vLLM's CPU build"):
        vllm_parts.name_the_wheel()
