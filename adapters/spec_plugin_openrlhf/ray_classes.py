"""OpenRLHF's two Ray actors as plain classes, to be extended."""

from __future__ import annotations

from typing import Any

from spec_plugin.adapter import PatchError

#: methods that the adapter extends
_NEEDS = {
    "RolloutRayActor": ("generate", "generate_responses", "sleep", "wake_up", "pause_generation", "resume_generation"),
    "PolicyModelActor": ("init_model_from_pretrained", "forward", "fit", "broadcast_to_vllm", "save_checkpoint"),
}


def undecorated(actor_class: Any, name: str) -> Any:
    """The class behind ``@ray.remote``.

    Raises:
        PatchError: if it is not one, or lacks a method that we extend.
    """
    try:
        plain = actor_class.__ray_metadata__.modified_class.__ray_actor_class__
    except AttributeError as error:
        raise PatchError(
            f"openrlhf's {name} is no Ray actor class any more ({error}); use openrlhf >=0.11,<0.12"
        ) from error
    if missing := [method for method in _NEEDS[name] if not hasattr(plain, method)]:
        raise PatchError(f"openrlhf's {name} has no {', '.join(missing)} any more; use openrlhf >=0.11,<0.12")
    return plain
