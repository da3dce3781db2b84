"""Classes of vLLM's that hand no hidden states to a draft though they lack no more than the interface: the engine completes them.

Data alone, since a run is checked where no vLLM can be imported; ``engine/repairs/hidden_states.py`` does it. A class that vLLM
completes itself needs its line here no longer, and a test says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spec_plugin.plan.sources import source_of

_LLAMA = {"llama": ("_maybe_add_hidden_state(", "return hidden_states, aux_hidden_states")}


@dataclass(frozen=True)
class Completable:
    """One class of vLLM's, and what makes sure that it is still the one that was looked at."""

    name: str
    module: str  # below vLLM's models
    relies_on: Mapping[str, tuple[str, ...]]  # module -> pieces of its source that must be there
    #: class of its decoder whose forward pass is that of vLLM's Llama but for the hidden states; "": it is Llama's already
    like_llamas: str = ""

    @property
    def changed(self) -> str:
        """What the installed vLLM lacks of ``relies_on``, in words; empty: the class can be completed."""
        for module, pieces in self.relies_on.items():
            source = source_of("vllm", f"model_executor/models/{module}.py")
            if lost := [piece for piece in pieces if piece not in source]:
                return f"vllm/model_executor/models/{module}.py has no {lost[0]!r} any more"
        return ""


#: by name
COMPLETABLE: Mapping[str, Completable] = {
    found.name: found
    for found in (
        Completable(
            "Glm4ForCausalLM",
            "glm4",
            {"glm4": ("class Glm4Model(LlamaModel):", "hidden_states = self.model(\n"), **_LLAMA},
        ),
        Completable(
            "Glm4vForConditionalGeneration",
            "glm4_1v",
            {
                "glm4_1v": ('architectures = ["Glm4ForCausalLM"]', "hidden_states = self.language_model.model(\n"),
                "glm4": ("class Glm4Model(LlamaModel):",),
                **_LLAMA,
            },
        ),
        Completable(
            "SeedOssForCausalLM",
            "seed_oss",
            {
                "seed_oss": (
                    "class SeedOssModel(nn.Module):",
                    "self.model = SeedOssModel(\n",
                    "hidden_states, residual = layer(\n                positions,\n                hidden_states,\n"
                    "                residual,\n            )",
                    "hidden_states, _ = self.norm(hidden_states, residual)\n        return hidden_states",
                ),
                **_LLAMA,
            },
            like_llamas="SeedOssModel",
        ),
    )
}
