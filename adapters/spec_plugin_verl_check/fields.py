"""Options that reach verl's configuration and are in none of its dataclasses: verl's workers die of them, after a minute."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from spec_plugin.adapter import Objection, folder_of, meant_for_us, parsed
from spec_plugin_verl_check.compose import refused_by_verl
from spec_plugin_verl_check.options import as_builtin

#: verl's package of the dataclasses that its workers make, each named in the configuration by ``_target_``
_PACKAGE = "verl.workers.config"
_SECTIONS = ("actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model")


def unknown_fields(config: Any, refused: Sequence[Objection] = ()) -> Iterator[Objection]:
    """Each option that the dataclass of its section lacks; hydra takes whatever is appended with ``+``.

    Args:
        config: verl's whole configuration.
        refused: by hydra; these are in the configuration, and not repeated.
    """
    said = [objection.option.lstrip("+") for objection in refused]
    for path in _SECTIONS:
        for objection in _unknown(OmegaConf.select(config, path), path):
            option = objection.option.lstrip("+")
            if not any(one == option or one.startswith(f"{option}.") for one in said):
                yield objection


def _unknown(node: Any, path: str) -> Iterator[Objection]:
    if not isinstance(node, DictConfig):
        return
    package, _, kind = str(node.get("_target_") or "").rpartition(".")
    known = fields_of(kind) if package.startswith(_PACKAGE) else None
    for key in node:
        name = str(key)
        if known is not None and name not in known and not name.startswith("_"):
            value = None if OmegaConf.is_missing(node, key) else as_builtin(node.get(key))
            if not meant_for_us(name, value):  # of those ``options.misplaced`` says where they belong
                yield refused_by_verl(f"+{path}.{name}", str(value), f"its {kind} has no {name}", "remove it")
        elif not OmegaConf.is_missing(node, key) and not OmegaConf.is_interpolation(node, key):
            yield from _unknown(node.get(key), f"{path}.{name}")


def fields_of(name: str) -> frozenset[str] | None:
    """The fields of one of verl's dataclasses and of its bases.

    Args:
        name: of the class.

    Returns:
        None where it is not found, or one of them has an ``__init__`` of its own.
    """
    found = _classes().get(name)
    if found is None or any(isinstance(item, ast.FunctionDef) and item.name == "__init__" for item in found.body):
        return None
    annotated = (item.target for item in found.body if isinstance(item, ast.AnnAssign))
    fields = frozenset(target.id for target in annotated if isinstance(target, ast.Name))
    for base in found.bases:
        base_name = base.id if isinstance(base, ast.Name) else ""
        inherited = frozenset() if base_name == "BaseConfig" else fields_of(base_name)
        if inherited is None:
            return None
        fields |= inherited
    return fields


@lru_cache
def _classes() -> Mapping[str, ast.ClassDef]:
    folder = folder_of("verl")
    files = sorted(folder.joinpath("workers", "config").glob("*.py")) if folder else []
    trees = [parsed(file.read_text()) for file in files]
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
