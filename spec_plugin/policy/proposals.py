"""How the engine's draft proposes tokens: its likeliest ones, or draws from it at some temperature, as training's replay says."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from draft_training import DRAFT_TEMPERATURES, Evaluation, Sampled
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.events import TargetInfo, truncating
from spec_plugin.api.method import KNOWS_NOTHING, Method
from spec_plugin.step_cost.chances import tokens_per_step

logger = logging.getLogger(__name__)

#: what another temperature must promise, as a factor of what the present one does, in each of so many measurements in a row
_WORTH_IT, _IN_A_ROW = 1.03, 2
#: what a step with drawn proposals takes, in steps with greedy ones: 1.07 on a CPU (V1, a vocabulary of 49k, 8 requests, k=3), a
#: few more passes over the draft's logits on a card; nothing on V2, which draws either
_DRAWING_TAKES = 1.05
#: drafted tokens at which promises are compared, besides ``spec.k``: what the controller serves lies between
_FEW = 3


class Proposals:
    """The draft temperature that the next refresh brings to the engines."""

    def __init__(self, config: SpecConfig, target: TargetInfo, method: Method) -> None:
        self._k = config.k
        #: as a factor of the rollouts' temperature; 0: the draft's likeliest tokens
        self.draft_temperature = 1.0 if method.draws else 0.0
        #: how the rollouts sample, if training is to replay drawn proposals; None: the engine makes none, or they cannot be
        self.sampling = _sampling_of(target.sampling) if method.draws else None
        self._may_choose = self.sampling is not None and config.draft_sample_method == "auto"
        self._better = (self.draft_temperature, 0)  # one that promised more lately, and how often in a row
        self._judged = False  # was it ever by a draft that knows something

    def resume(self, draft_temperature: float | None) -> None:
        """Go on with the temperature of a checkpoint, if this run may choose it."""
        if self._may_choose and draft_temperature in DRAFT_TEMPERATURES:
            self._judged, self.draft_temperature = True, float(draft_temperature)

    def judged(self, found: Evaluation) -> Evaluation:
        """Take over what the draft would have made; the answer tells of the proposals that are chosen now."""
        if self._may_choose:
            self._choose({t: self._worth(t, found.proposals.chances(t)) for t in DRAFT_TEMPERATURES})
        return replace(found, draft_temperature=self.draft_temperature if self.sampling is not None else 0.0)

    def _choose(self, worth: dict[float, float]) -> None:
        best, now, first = max(worth, key=worth.__getitem__), self.draft_temperature, not self._judged
        self._judged |= worth[best] >= KNOWS_NOTHING
        if not self._judged or best == now or (not first and worth[best] < _WORTH_IT * worth[now]):
            self._better = (now, 0)
            return
        before, times = self._better
        self._better = (best, times + 1 if before == best else 1)
        if not first and self._better[1] < _IN_A_ROW:
            return
        self.draft_temperature, self._better = best, (best, 0)
        logger.info(
            "spec-plugin: the draft proposes %s: by training's replay %.2f tokens a step, for %.2f with %s",
            *(in_words(best), worth[best], worth[now], in_words(now)),
        )

    def _worth(self, draft_temperature: float, chances: tuple[float, ...]) -> float:
        """Tokens in the time of a greedy step, between few drafted tokens and as many as may be."""
        few, most = (tokens_per_step((*chances, 0.0), k) for k in (min(_FEW, self._k), self._k))
        return math.sqrt(few * most) / (_DRAWING_TAKES if draft_temperature else 1.0)


def _sampling_of(options: Mapping[str, Any]) -> Sampled | None:
    """How rollouts sample; None where that is not replayed: at temperature 0, or from tokens that somebody has listed."""
    cut, temperature = truncating(options), float(options.get("temperature", 1.0))
    if not temperature > 0.0 or options.get("allowed_token_ids") is not None:
        return None
    return Sampled(temperature, max(0, int(cut.get("top_k", 0))), float(cut.get("top_p", 1.0)))


def in_words(draft_temperature: float) -> str:
    """Proposals of this draft temperature, for a person."""
    return f"draws at {draft_temperature:g}" if draft_temperature else "its likeliest tokens"
