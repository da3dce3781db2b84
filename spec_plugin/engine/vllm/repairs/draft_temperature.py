"""A temperature of a draft that may change while the engine runs: a number in device memory, by which its logits are multiplied.

1 draws proposals as vLLM does, a large one proposes the likeliest token, what lies between sharpens. Both model runners keep the
logits, or what they make of them, as what was sampled from, so that verification is exact at each. A captured CUDA graph reads
the number where it lies, so that writing it in place is enough.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from spec_plugin.api.errors import PatchError
from spec_plugin.engine.vllm.repairs.patches import Guard, Patch

#: the largest factor: logits a hundredth apart are e^10 apart in probability. Differences to the largest are multiplied, which
#: overflow to no more than a probability of zero
_MOST = 1000.0
_NAME = "spec_sharpness"
#: of a proposer of V1, which looks at it each time that it proposes: the likeliest tokens are had for less than a draw
_DRAWS = "_enable_probabilistic_draft_probs"


def make_tempered(model: nn.Module, proposer: Any = None) -> None:
    """Have the logits of a draft, of this proposer, multiplied by a number of its own, 1 for now."""
    plain: Any = model.compute_logits
    sharpness = torch.ones((), device=next(model.parameters()).device)

    def compute_logits(*args: Any, **kwargs: Any) -> Tensor | None:
        logits: Tensor | None = plain(*args, **kwargs)
        if logits is None or not getattr(
            model.spec_proposer, _DRAWS, True
        ):  # a rank that gathers none; nothing is drawn
            return logits
        return (logits - logits.amax(dim=-1, keepdim=True)).mul_(sharpness)

    setattr(model, _NAME, sharpness)
    model.spec_proposer = proposer
    model.compute_logits = compute_logits  # type: ignore[assignment]


def set_draft_temperature(model: nn.Module | None, draft_temperature: float) -> None:
    """Draw from here on at this factor of the requests' temperature, or propose the likeliest token at 0.

    Nothing where the engine samples no proposals.
    """
    sharpness: Tensor | None = getattr(model, _NAME, None)
    if model is None or sharpness is None:
        return
    sharpness.fill_(min(_MOST, 1.0 / draft_temperature) if draft_temperature > 0.0 else _MOST)
    if hasattr(model.spec_proposer, _DRAWS):
        setattr(model.spec_proposer, _DRAWS, draft_temperature > 0.0)


def refuse_untempered(model: nn.Module | None) -> None:
    """Of an engine that samples its proposals.

    Raises:
        PatchError: if the draft's temperature cannot be changed: its class was loaded past the repair.
    """
    if model is not None and not hasattr(model, _NAME):
        raise PatchError(
            f"the draft {type(model).__name__} was loaded by a function of vLLM that spec-plugin does not know, so its proposals "
            "cannot be sharpened: set spec.draft_sample_method=greedy, and report this"
        )


def _with_temperature(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        make_tempered(self.model, self)

    load_model.tempers = True  # type: ignore[attr-defined]
    return load_model


def _patch(runner: str, symbol: str, landmark: str) -> Patch:
    return Patch(
        name=f"draft_temperature_{runner}",
        symbol=symbol,
        reason="a draft's proposals are drawn at the requests' own temperature, or are its likeliest tokens, for as long as the "
        "engine runs; which is accepted more often depends on the draft and the policy, which change",
        upstream="none: vLLM has one setting for both, made at start",
        versions="0.29.0, both runners, on a CPU (V2 in Triton's interpreter)",
        needed=lambda function: not getattr(function, "tempers", False),
        replacement=_with_temperature,
        guard=Guard(parameters=("self", "target_model"), landmarks=(landmark,)),
    )


#: for an engine that samples its proposals, before its worker is made, by its model runner
TEMPERATURE_PATCHES = {
    False: _patch("v1", "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.load_model", "self.model ="),
    True: _patch("v2", "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.load_model", "self.model ="),
}
