"""One request of the trainer's: whether it may be drafted for, its ``extra_args``, and its response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_plugin.api.errors import SpecConfigError
from spec_plugin.engine.control_group import ControlStretch
from spec_plugin.engine.flight import Request
from spec_plugin.engine.lossless import check_sampling
from spec_plugin.engine.vllm.requests import stated_log_probs
from spec_plugin.engine.vllm.schedule.plain import PLAIN


@dataclass
class SampledRequest:
    """One request inside ``EngineFront.sample``: the adapter passes ``extra_args`` on and calls ``completed``."""

    request: Request
    control: ControlStretch | None  # the stretch that it samples without drafts, if it is one of the control group
    #: for vLLM's ``SamplingParams.extra_args``, the trainer's own among them; without them the engine cannot match the request
    extra_args: dict[str, Any]
    response: Sequence[int] | None = None  # token ids
    version: int | None = None  # policy version that sampled all of it, where the adapter knows
    log_probs: Sequence[float] | None = None  # of the response
    asked: bool = True  # did the trainer ask for them

    def completed(
        self,
        response: Sequence[int],
        version: int | None = None,
        log_probs: Sequence[float] | None = None,
        asked: bool = True,
    ) -> None:
        """Record the engine's answer; call it before the block ends.

        Args:
            response: token ids that were sampled, without the prompt's.
            version: policy version that sampled all of them, where the trainer cuts requests short at a weight sync and so
                knows it. None: that of the phase, or those of the phases, in which the request ran.
            log_probs: of the response, where the trainer does not learn which version sampled it: they distinguish
                requests of the same text.
            asked: has the trainer asked for them; if not, they are kept aside, to verify what they can
                (``spec_plugin.api.witness``).
        """
        self.response, self.version, self.log_probs, self.asked = response, version, log_probs, asked
        self.request.tokens = len(response)

    def answered(self, answer: Any, asked: bool = True) -> None:
        """The same from vLLM's ``CompletionOutput``, with the log-prob of each sampled token where it has them."""
        self.completed(answer.token_ids, log_probs=stated_log_probs(answer) or None, asked=asked)


def is_listed(sampling: Mapping[str, Any]) -> bool:
    """True if these sampling options are on the lossless allow-list."""
    try:
        check_sampling(dict(sampling))
    except SpecConfigError:
        return False
    return True


def extra_args(
    given: Mapping[str, Any], listed: bool, control: ControlStretch | None, request: Request
) -> dict[str, Any]:
    """The request's ``extra_args``: the trainer's, and ours. One that is not listed runs without drafts: exact, but slower."""
    undrafted: Mapping[str, Any] = {} if control is None else control.extra_args
    return {**(given.get("extra_args") or {}), **(undrafted if listed else PLAIN), **request.extra_args}
