"""Options that reach verl's configuration and are in none of its dataclasses, of which its workers die; read in its sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from spec_plugin.adapter import Objection, folder_of, meant_for_us, parsed
from spec_plugin_verl_check.compose import not_taken, verl_version
from spec_plugin_verl_check.options import plain

#: verl's package of the dataclasses that its workers make, each named in the configuration by ``_target_``
_PACKAGE = "verl.workers.config"
_SECTIONS = ("actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model")


@dataclass(frozen=True)
class _Class:
    bases: tuple[str, ...]
    fields: frozenset[str]
    open: bool  # it makes itself, from whatever it is given


def with_unknown(config: Any, refused: Sequence[Objection]) -> Iterator[Objection]:
    """What hydra has refused, and then each option that the dataclass of its section lacks.

    Hydra takes whatever is appended with ``+``, and advises it; where the dataclass lacks the option, too, that helps nobody.

    Args:
        config: verl's whole configuration, with what was refused in it.
        refused: by hydra.
    """
    lacking = {o.option.lstrip("+"): o for path in _SECTIONS for o in _unknown(OmegaConf.select(config, path), path)}
    named = {key for o in refused for key in lacking if _within(o.option.lstrip("+"), key)}
    for objection in refused:
        lost = any(_within(objection.option.lstrip("+"), key) for key in lacking)
        yield replace(objection, instead="leave it out") if lost else objection
    yield from (objection for key, objection in lacking.items() if key not in named)


def _within(option: str, key: str) -> bool:
    return option == key or option.startswith(f"{key}.")


def _unknown(node: Any, path: str) -> Iterator[Objection]:
    if not isinstance(node, DictConfig):
        return
    target = str(node.get("_target_") or "")
    known = fields_of(target.rpartition(".")[2]) if target.startswith(f"{_PACKAGE}.") else None
    for key in node:
        name = str(key)
        if known is not None and name not in known and not name.startswith("_"):
            value = None if OmegaConf.is_missing(node, key) else plain(node.get(key))
            if not meant_for_us(name, value):  # of those ``options.misplaced`` says where they belong
                kind = target.rpartition(".")[2]
                why = f"verl {verl_version()} refuses this itself: its {kind} has no {name}"
                yield Objection(f"+{path}.{name}", str(value), not_taken(), why, "leave it out", "verl")
        elif not OmegaConf.is_missing(node, key) and not OmegaConf.is_interpolation(node, key):
            yield from _unknown(node.get(key), f"{path}.{name}")


def fields_of(name: str) -> frozenset[str] | None:
    """The fields of one of verl's dataclasses and of those above it.

    Args:
        name: of the class.

    Returns:
        None where it is not found, or one of them makes itself.
    """
    found = _classes().get(name)
    if found is None or found.open:
        return None
    fields = found.fields
    for base in found.bases:
        if base == "BaseConfig":
            continue
        above = fields_of(base)
        if above is None:
            return None
        fields |= above
    return fields


@lru_cache
def _classes() -> Mapping[str, _Class]:
    folder = folder_of("verl")
    files = sorted(folder.joinpath("workers", "config").glob("*.py")) if folder else []
    trees = [parsed(file.read_text()) for file in files]
    return {node.name: _class(node) for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def _class(node: ast.ClassDef) -> _Class:
    annotated = [item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)]
    fields = frozenset(item.target.id for item in annotated if isinstance(item.target, ast.Name))
    bases = tuple(base.id if isinstance(base, ast.Name) else "" for base in node.bases)
    makes_itself = any(isinstance(item, ast.FunctionDef) and item.name == "__init__" for item in node.body)
    return _Class(bases, fields, makes_itself)
