"""Targets whose class in vLLM lacks only the interface by which a draft reads hidden states: they are served by a subclass.

Registered by vLLM's own door for models from outside (``ModelRegistry.register_model``), in the worker alone, before it loads
one; a class that has the interface is left as it is.
"""

from __future__ import annotations

import importlib
import types
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch as set_for_now

from spec_plugin.api.errors import PatchError
from spec_plugin.plan.completable import COMPLETABLE, Completable


def complete_target(vllm_config: Any) -> str | None:
    """Have vLLM serve a target by a subclass that hands out its hidden states.

    Args:
        vllm_config: vLLM's own, of the engine whose worker this is.

    Returns:
        The class's name; None where vLLM's own class does all that can be done.

    Raises:
        PatchError: if vLLM goes on with its own class.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.model_loader import utils
    from vllm.model_executor.models.interfaces import supports_eagle3

    target = vllm_config.model_config
    own, architecture = utils.get_model_architecture(target)
    found = COMPLETABLE.get(own.__name__)
    if found is None or found.changed or supports_eagle3(own):
        return None
    ModelRegistry.register_model(architecture, completed(own, found))
    utils._MODEL_ARCH_BY_HASH.clear()  # it may have been asked for already in this process
    if not supports_eagle3(utils.get_model_cls(target)):
        raise PatchError(
            f"vLLM goes on serving {architecture} by its own {own.__name__}, which hands no hidden states to a draft, though "
            "another class is registered for it: install a vLLM of the range that spec-plugin declares, and report this"
        )
    return found.name


def completed(own: type[Any], about: Completable) -> type[Any]:
    """A subclass of vLLM's class ``own`` that returns the hidden states which enter its layers."""
    from vllm.model_executor.models.interfaces import SupportsEagle3

    module: Any = importlib.import_module(own.__module__)

    name = about.like_llamas
    decoder = _with_llamas_forward(getattr(module, name)) if name else None

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:  # vLLM reads these names
        with set_for_now.object(module, name, decoder) if name else nullcontext():
            own.__init__(self, vllm_config=vllm_config, prefix=prefix)
        if hasattr(self.config, "image_token_id"):  # by the name that vLLM's proposer asks for where it knows no class
            self.config.image_token_index = self.config.image_token_id

    body = {"__init__": __init__, "__module__": __name__, "__doc__": own.__doc__}
    return type(own.__name__, (own, SupportsEagle3), body)


def _with_llamas_forward(decoder: type[Any]) -> type[Any]:
    """A decoder's class with the forward pass of vLLM's Llama; compiled as it is itself."""
    from vllm.model_executor.models.interfaces import EagleModelMixin
    from vllm.model_executor.models.llama import LlamaModel

    theirs: Any = LlamaModel.forward
    # a copy: vLLM's compiler puts compiled code into the function that it finds
    forward = types.FunctionType(theirs.__code__, theirs.__globals__, "forward", theirs.__defaults__)
    forward.__kwdefaults__, forward.__annotations__ = theirs.__kwdefaults__, dict(theirs.__annotations__)
    return type(decoder.__name__, (decoder, EagleModelMixin), {"forward": forward, "__module__": __name__})
