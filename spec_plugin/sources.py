"""What the installed vLLM's sources say, read as text: importing them takes half a minute, and a check takes two seconds."""

from __future__ import annotations

import ast
import gc
import os
from importlib.util import find_spec
from pathlib import Path

#: vLLM's V2 model runner loads EAGLE drafts here
_V2_LOADER = ("v1/worker/gpu/spec_decode/eagle/utils.py", "load_eagle_model")


def folder_of(package: str) -> Path | None:
    """Where an installed package lies, which is not imported; None where it is not installed."""
    spec = find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else None


def source_of(package: str, file: str) -> str:
    """The text of a file of an installed package, which is not imported; empty where there is none."""
    folder = folder_of(package)
    path = folder / file if folder else None
    return path.read_text() if path and path.is_file() else ""


def parsed(text: str) -> ast.Module:
    """The syntax tree of a Python text, read while nothing is collected.

    A finalizer that parses too, as that of a task whose exception nobody has seen does for its traceback, makes Python 3.11
    count its recursion into the outer parse and end it with SystemError (cpython issue 106905).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if collects:
            gc.enable()


def v2_takes_every_k() -> bool:
    """May k change while vLLM's V2 model runner runs; where it may not, vLLM takes V1 for us."""
    return "dynamic speculative decoding" not in source_of("vllm", "config/vllm.py")


def loads_drafts_like_targets() -> bool:
    """Does vLLM's V2 model runner load a draft as it loads the target, whatever ``draft_load_config`` says.

    It does in 0.29; V1 and 0.33 do not.
    """
    file, name = _V2_LOADER
    source = source_of("vllm", file)
    functions = [n for n in ast.walk(parsed(source)) if isinstance(n, ast.FunctionDef) and n.name == name]
    return any("draft_load_config" not in (ast.get_source_segment(source, f) or "") for f in functions)


def drops_a_drafts_own_head(load_format: str, device_type: str) -> bool:
    """Would this vLLM put the target's head in the place of a draft's own: it looks for one in what it has loaded.

    Args:
        load_format: of the engine.
        device_type: of the engine.
    """
    v2 = device_type != "cpu" and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0" and v2_takes_every_k()
    return load_format == "dummy" and v2 and loads_drafts_like_targets()
