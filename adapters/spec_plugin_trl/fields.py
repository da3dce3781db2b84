"""Which fields TRL's configurations have, and what of a script is certain without running it; for ``spec-plugin check trl``."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence

from spec_plugin.adapter import Objection, source_of
from spec_plugin_trl import options

_CONFIGS = ("GRPOConfig", "RLOOConfig")
_TRAINERS = ("GRPOTrainer", "RLOOTrainer")
_OF_CONFIGS = (
    *(("trl", f"trainer/{name}_config.py") for name in ("grpo", "rloo", "base")),
    ("transformers", "training_args.py"),
)
_OF_RECIPES = [
    ("trl", file) for file in ("trainer/model_config.py", "scripts/utils.py", "scripts/grpo.py", "scripts/rloo.py")
]
_UNEXPECTED = re.compile(r"(?:GRPO|RLOO)Config\.__init__\(\) got an unexpected keyword argument '(\w+)'")


def unknown_flags(names: Iterable[str]) -> Iterator[Objection]:
    """Flags and keys of a YAML file that ``trl grpo`` and ``trl rloo`` refuse; those of ``accelerate launch`` are theirs, too."""
    if not (known := _declared(_OF_CONFIGS)):
        return
    known += _declared(_OF_RECIPES)
    launch = re.findall(r"[\"']--(\w+)[\"']", source_of("accelerate", "commands/launch.py"))
    known += ["config", "env", "help", "accelerate_config", *launch]
    yield from _unknown("flag", (name for name in names if name.removeprefix("no_") not in known), known)


def unexpected(error: str) -> Iterator[Objection]:
    """Of a dry run's last words, if a configuration was given a field that it does not have."""
    if found := _UNEXPECTED.search(error):
        yield from _unknown("field", [found[1]], _declared(_OF_CONFIGS))


def of_script(text: str) -> tuple[str, list[Objection]]:
    """What is certain of a script that is not run.

    Args:
        text: its source; one that is no Python tells nothing.

    Returns:
        The model that its one trainer gets, as a string or as a name that is bound once, to one; empty: it is not seen. And
        fields in its calls of TRL's configurations that these do not have.
    """
    try:
        nodes = [*ast.walk(ast.parse(text))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "", []
    bound: dict[str, list[ast.expr | None]] = {}
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.setdefault(node.id, []).append(None)
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            bound[node.targets[0].id][-1] = node.value
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "trl"]
    theirs = {alias.asname or alias.name: alias.name for node in imports for alias in node.names}
    calls = [(theirs.get(_called(node), ""), node) for node in nodes if isinstance(node, ast.Call)]
    given = [_model(node) for name, node in calls if name in _TRAINERS]
    model = given[0] if len(given) == 1 else None
    if isinstance(model, ast.Name) and len(values := bound.get(model.id, [])) == 1:
        model = values[0]
    names = [word.arg for name, node in calls if name in _CONFIGS for word in node.keywords if word.arg]
    known = _declared(_OF_CONFIGS)
    found = [*_unknown("field", [name for name in dict.fromkeys(names) if known and name not in known], known)]
    return (str(model.value) if isinstance(model, ast.Constant) and isinstance(model.value, str) else ""), found


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _model(call: ast.Call) -> ast.expr | None:
    named = next((word.value for word in call.keywords if word.arg == "model"), None)
    return named or next(iter(call.args), None)


def _declared(files: Sequence[tuple[str, str]]) -> list[str]:
    """Fields of the dataclasses in these files of what is installed; none where TRL's or transformers' are not there."""
    texts = [source_of(*file) for file in files]
    if files is _OF_CONFIGS and not (texts[0] and texts[-1]):
        return []
    return [*dict.fromkeys(name for text in texts for name in re.findall(r"^    (\w+): ", text, re.MULTILINE))]


def _unknown(what: str, names: Iterable[str], known: list[str]) -> Iterator[Objection]:
    version = options.trl_version()
    for name in names:
        near = difflib.get_close_matches(name, known, n=1)
        instead = f"did you mean {near[0]}?" if near else "leave it out"
        yield Objection(
            "",
            "",
            f"a {what} that TRL does not have",
            f"trl {version} refuses this itself: it has no {what} {name}",
            instead,
            "trl",
        )
