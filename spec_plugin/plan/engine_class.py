"""Which class of the installed vLLM would serve a target, and what that class can do: read from its sources, not imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import resolve_name
from typing import Any

from draft_training.outside import text_part
from spec_plugin.api.errors import CannotDraft
from spec_plugin.plan.completable import COMPLETABLE
from spec_plugin.plan.sources import parsed, source_of

_MODELS = "vllm.model_executor.models"
#: of vLLM's registry: the tables of models that generate text
_TABLES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_BACKEND_MODELS")
#: what vLLM's class says, by being its subclass, of a model that hands out the hidden states that enter its layers
_STATES = "SupportsEagle3"
#: and of one in which some layers keep a recurrent state for each request in place of a cache of keys and values
_HYBRID = "IsHybrid"
#: ``layer_types`` of config.json that keep none; as vLLM's ModelConfig.is_hybrid has it
_STATELESS = ("attention", "full_attention")


@dataclass(frozen=True)
class EngineClass:
    """The class that vLLM would take for a target."""

    name: str
    bases: frozenset[str]  # names of all classes above it, interfaces among them

    @property
    def hands_out_states(self) -> bool:
        """Can a draft read the hidden states that enter its layers: as vLLM has it, or as our engine completes it."""
        return _STATES in self.bases or (self.name in COMPLETABLE and not COMPLETABLE[self.name].changed)

    @property
    def hybrid(self) -> bool:
        """Do some of its layers keep a recurrent state for each request: a gated delta net, Mamba."""
        return _HYBRID in self.bases


def engine_class(hf: Mapping[str, Any]) -> EngineClass | None:
    """vLLM's class for a target.

    Args:
        hf: the target's config.json.

    Returns:
        Of an architecture that only transformers knows, vLLM's class around it. None where no vLLM is installed, or neither
        knows the architecture.
    """
    return next((found for name in architectures(hf) if (found := _class_of(name)) is not None), None)


def keeps_states(hf: Mapping[str, Any]) -> bool:
    """Does vLLM keep recurrent states for this target, beside a cache of keys and values.

    Args:
        hf: the target's config.json.
    """
    found = engine_class(hf)
    types = hf.get("layer_types") or text_part(hf).get("layer_types")
    return found is not None and found.hybrid and not (types and all(kind in _STATELESS for kind in types))


def unreadable(hf: Mapping[str, Any], newborn: bool = True) -> tuple[str, str] | None:
    """Why no draft can read this target's hidden states in the installed vLLM; None if one can, or nobody can tell.

    Args:
        hf: the target's config.json.
        newborn: the draft is not given: then a class that is not known counts as one that cannot.

    Returns:
        A few words that stay the same from run to run, and a sentence without a full stop.
    """
    found = engine_class(hf)
    if found is None:
        nothing_said = not architectures(hf) and not hf.get("model_type")
        if not newborn or nothing_said or not _registry():
            return None
        named = " or ".join(architectures(hf)) or f"model_type={hf.get('model_type')!r}"
        why = f"the installed vLLM has no class of its own for {named}, so whether it hands out hidden states cannot be told"
        return "an architecture that vLLM does not know", why
    if found.hands_out_states:
        return None
    why = f"vLLM's class {found.name}, which would serve this target, hands no hidden states to a draft"
    return f"no hidden states from vLLM's {found.name}", why


def refuse_unreadable(hf: Mapping[str, Any], newborn: bool, instead: str) -> None:
    """Raise ``CannotDraft``, saying ``instead``, for a target of ``unreadable``."""
    if (found := unreadable(hf, newborn)) is not None:
        raise CannotDraft(*found, instead)


def architectures(hf: Mapping[str, Any]) -> list[str]:
    """As config.json names them; where it names none, transformers' causal LM of that ``model_type``, as vLLM does it."""
    if named := hf.get("architectures"):
        return [str(name) for name in named]
    found = (_causal_lms().get(str(part.get("model_type"))) for part in (hf, text_part(hf)))
    return [name for name in found if name][:1]


@lru_cache
def _class_of(architecture: str) -> EngineClass | None:
    around = "TransformersForCausalLM" if architecture in _causal_lms().values() else ""
    place = _registry().get(architecture) or _registry().get(around)
    if place is None:
        return None
    module, name = place
    return EngineClass(name, frozenset(_above(module, name, set())))


def _above(module: str, name: str, seen: set[tuple[str, str]]) -> Iterator[str]:
    """Names of the classes above one of a module of vLLM's, interfaces among them."""
    if (module, name) in seen:
        return
    seen.add((module, name))
    classes, imports = _outline(module)
    if name in classes:
        for base in classes[name]:
            yield base
            yield from _above(module, base, seen)
    elif name in imports:
        yield from _above(*imports[name], seen)


@lru_cache
def _outline(module: str) -> tuple[dict[str, list[str]], dict[str, tuple[str, str]]]:
    """The classes of a module of vLLM's models with their bases, and where its imported names come from; else nothing."""
    classes: dict[str, list[str]] = {}
    imports: dict[str, tuple[str, str]] = {}
    if not module.startswith(f"{_MODELS}."):
        return classes, imports
    file, package = module.removeprefix("vllm.").replace(".", "/"), module.rpartition(".")[0]
    if not (text := source_of("vllm", f"{file}.py")):
        text, package = source_of("vllm", f"{file}/__init__.py"), module
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.ClassDef):
            classes[node.name] = [b.attr if isinstance(b, ast.Attribute) else ast.unparse(b) for b in node.bases]
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            imports |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
    return classes, imports


@lru_cache
def _registry() -> dict[str, tuple[str, str]]:
    """vLLM's module and class of each architecture that generates text."""
    text = source_of("vllm", "model_executor/models/registry.py")
    tables = re.findall(rf"^(?:{'|'.join(_TABLES)}) = {{$(.*?)^}}", text, re.M | re.S)
    entries = re.findall(r'^    "(\w+)": \(\s*"([\w.]+)",\s*"(\w+)"', "".join(tables), re.M)
    return {architecture: (f"{_MODELS}.{module}", name) for architecture, module, name in entries}


@lru_cache
def _causal_lms() -> dict[str, str]:
    """transformers' causal LM of each ``model_type``."""
    text = source_of("transformers", "models/auto/modeling_auto.py")
    found = re.search(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict\((.*?)^\)", text, re.M | re.S)
    return dict(re.findall(r'\("([\w-]+)", "(\w+)"\)', found[1])) if found else {}
