"""Law 8 in our own sources: nothing is unpickled, nobody listens, and what we read is safetensors and JSON."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from builders.paths import ROOT

from spec_plugin.plan.sources import parsed

PACKAGES = ("spec_plugin", "draft_training", "adapters", "testing", "projection")
#: of what they read code can be made, or anybody can send them something
FORBIDDEN = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "zmq", "socket", "socketserver", "http"}
#: calls that unpickle, or run text
CALLS = {"torch.load", "numpy.load", "np.load", "eval", "exec", "pd.read_pickle", "yaml.load", "yaml.unsafe_load"}
#: What vLLM reads, in the same way and from the same folder, when its engine starts: numbers, by torch's own narrow unpickler.
NUMBERS = {"draft_training/weights.py": {"torch.load"}}
#: The kit, which no run imports: its fork server lies in a folder of its own user, it asks for a free port on which it does not
#: listen, and it reads what its own run has saved.
KIT = {
    "testing/spec_plugin_conformance/launch.py": {"socket"},
    "testing/spec_plugin_cpu/forks/__init__.py": {"socket"},
    "testing/spec_plugin_cpu/forks/server.py": {"socket", "exec"},
    "testing/spec_plugin_cpu/forks/stand_in.py": {"socket"},
    "testing/spec_plugin_verl_cpu/checkpoints.py": {"torch.load"},
    "testing/spec_plugin_openrlhf_cpu/conformance.py": {"torch.load"},
    "testing/spec_plugin_trl_cpu/conformance.py": {"torch.load"},
}


def used(tree: ast.AST) -> Iterator[str]:
    """Names of forbidden modules that are imported, and of forbidden functions that are called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (top for alias in node.names if (top := alias.name.partition(".")[0]) in FORBIDDEN)
        elif isinstance(node, ast.ImportFrom) and (top := (node.module or "").partition(".")[0]) in FORBIDDEN:
            yield top
        elif isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in CALLS:
            yield name


@pytest.mark.parametrize("package", PACKAGES)
def test_law_8_no_code_of_ours_unpickles_listens_or_runs_text(package: str) -> None:
    files = [file for file in (ROOT / package).rglob("*.py") if "build" not in file.relative_to(ROOT).parts]
    assert len(files) > 10
    found = {str(file.relative_to(ROOT)): set(used(parsed(file.read_text()))) for file in files}
    assert {file: names for file, names in found.items() if names} == {
        file: names for file, names in (NUMBERS | KIT).items() if file.startswith(package)
    }


@pytest.mark.parametrize("file", NUMBERS)
def test_what_is_read_by_torch_is_numbers_and_nothing_else(file: str) -> None:
    calls = [node for node in ast.walk(parsed((ROOT / file).read_text())) if isinstance(node, ast.Call)]
    loads = [call for call in calls if ast.unparse(call.func) == "torch.load"]
    assert loads and all("weights_only=True" in map(ast.unparse, call.keywords) for call in loads)


@pytest.mark.parametrize(
    "code", ["import pickle", "from zmq import Context", "import torch\ntorch.load('x')", "exec(text)", "import socket"]
)
def test_each_of_them_would_be_seen(code: str) -> None:
    assert list(used(parsed(code)))
