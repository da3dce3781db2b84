"""What vLLM does wrong where a target keeps recurrent states, and what is done about it: by capability, not by model name.

In a gated delta net or a Mamba layer a request has a state in place of a cache. A verification step leaves one state behind
each drafted token, and the *next* verification step takes up that of the last accepted one. Two things follow in vLLM 0.29:

prefix caching        caches a state that rejected tokens were written over (vLLM issue 53912: other text, without a word; on a
                      CPU two of its kernels are missing, so the engine dies). It is turned off, and so is asynchronous
                      scheduling, which that issue names, too: no CPU engine has it, so nothing was shown with it.
drafts that end       a step without drafts takes up the first state, whatever was accepted before it (``gdn_attn.py``), and on
in flight             a CPU one with fewer than the engine's k reads its convolution's past at the wrong place. So k tokens are
                      drafted or none, alike for all batch sizes; nothing is dropped in the middle of a phase, a table without
                      drafts waits until no request is in flight, a request of the control group is plain from its first token
                      on, and methods that often find no draft are refused. Where vLLM itself cuts drafts, at the end of the
                      context or of a full step, the request is computed anew (``spec_plugin.engine.vllm.schedule.preemption``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from spec_plugin.api.errors import SpecConfigError
from spec_plugin.api.events import Schedule
from spec_plugin.plan.engine_class import keeps_states

logger = logging.getLogger(__name__)

TURNED_OFF = ("enable_prefix_caching", "async_scheduling")


def check_states(hf: Mapping[str, Any], variable_length: bool, method: str) -> None:
    """Refuse a method that drafts now and then for a target with states.

    Args:
        hf: the target's config.json.
        variable_length: may the method propose fewer than k tokens, or none.
        method: its name, for the message.

    Raises:
        SpecConfigError: if it may propose none, and the target keeps recurrent states.
    """
    if variable_length and keeps_states(hf):
        raise SpecConfigError(
            f"spec.method={method} drafts at some steps of a request and not at others, and this target keeps recurrent "
            "states, which vLLM would then continue from the wrong token: set spec.method to one that drafts at every step"
        )


def turned_off(given: Mapping[str, Any]) -> dict[str, bool]:
    """The engine options to add for a target with states.

    Args:
        given: the trainer's engine arguments; where they are silent, vLLM may turn them on.
    """
    for name in TURNED_OFF:
        if given.get(name):
            logger.warning(
                "spec-plugin: engine option %s=True is overridden with False: with drafts it gives wrong text on a target with "
                "recurrent states (vLLM issue 53912)",
                name,
            )
    return dict.fromkeys(TURNED_OFF, False)


def for_states(wanted: Schedule, k: int, current: int, in_flight: bool) -> Schedule:
    """The schedule that keeps states right: ``k`` tokens or none, alike for all batch sizes, and none under no request with some.

    Args:
        wanted: by the controller; drafts are served where it wants all of ``k`` at every batch size, so that none is slower than
            plain decoding.
        k: that the engine was built with.
        current: that is in force, 0 or ``k``.
        in_flight: are there requests that may have drafted with it.
    """
    drafts = min(wanted.table[1:], default=0) >= k or (in_flight and current > 0)
    return Schedule((k * drafts,) * len(wanted.table), control_share=wanted.control_share)
