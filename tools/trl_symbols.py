"""Is all that the adapter for TRL wraps there in other versions of TRL: ``.envs/trl/bin/python tools/trl_symbols.py 1.8.0 …``.

Each version's wheel is downloaded (under a megabyte), its sources are read as text, and each wrapped method is called as the
adapter calls it, on its signature alone. Nothing of it is imported. A line a version; exit code 1 if one misses something.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from spec_plugin_trl.registration import ENGINE, METHODS, WRAPPED, Called

#: of these every trainer of transformers inherits its own
INHERITED = ("_load_optimizer_and_scheduler",)
_KIND = inspect.Parameter


def signature(function: ast.FunctionDef) -> inspect.Signature:
    """Of a function in a source, without the values of its defaults."""
    a = function.args
    plain = [*a.posonlyargs, *a.args]
    given = len(plain) - len(a.defaults)
    found = [
        _KIND(p.arg, _KIND.POSITIONAL_OR_KEYWORD, default=_KIND.empty if i < given else None)
        for i, p in enumerate(plain)
    ]
    found += [_KIND(a.vararg.arg, _KIND.VAR_POSITIONAL)] if a.vararg else []
    named = zip(a.kwonlyargs, a.kw_defaults, strict=True)
    found += [_KIND(p.arg, _KIND.KEYWORD_ONLY, default=_KIND.empty if d is None else None) for p, d in named]
    found += [_KIND(a.kwarg.arg, _KIND.VAR_KEYWORD)] if a.kwarg else []
    return inspect.Signature(found)


def missing(source: str, name: str, methods: Mapping[str, Called]) -> list[str]:
    """What of a class is not there, or cannot be called so.

    Args:
        source: of its module.
        name: of the class.
        methods: how each is called.
    """
    classes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef) and node.name == name)
    found = next(classes, None)
    if found is None:
        return [name]
    functions = {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}
    wrong = []
    for method, called in methods.items():
        if method not in functions:
            wrong += [] if method in INHERITED else [f"{name}.{method}"]
            continue
        if not called.positional:
            continue
        try:
            signature(functions[method]).bind(*called.positional, **dict.fromkeys(called.named))
        except TypeError as error:
            wrong.append(f"{name}.{method} ({error})")
    return wrong


def look(folder: Path) -> list[str]:
    """What an unpacked TRL lacks."""
    wrong = []
    for module, name in WRAPPED.items():
        wrong += missing(_source(folder, module), name, METHODS[name])
    calls = [node for node in ast.walk(ast.parse(_source(folder, ENGINE))) if isinstance(node, ast.Call)]
    if not any(isinstance(call.func, ast.Name) and call.func.id == "LLM" for call in calls):
        wrong.append(f"{ENGINE}.LLM")
    return wrong


def _source(folder: Path, module: str) -> str:
    file = folder.joinpath(*module.split(".")).with_suffix(".py")
    return file.read_text() if file.is_file() else ""


def main(versions: Sequence[str]) -> int:
    """Look at each version."""
    failed = False
    for version in versions:
        with tempfile.TemporaryDirectory() as scratch:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, f"trl=={version}"]
            subprocess.run(command, check=True)
            (wheel,) = Path(scratch).glob("*.whl")
            zipfile.ZipFile(wheel).extractall(scratch)
            wrong = look(Path(scratch))
        failed = failed or bool(wrong)
        print(f"trl {version}: {'missing ' + ', '.join(wrong) if wrong else 'all there'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
