"""What vLLM does wrong where a target keeps recurrent states, and what is done about it: by capability, not by model name.

In a gated delta net or a Mamba layer a request has a state in place of a cache. A verification step leaves one state behind
each drafted token, and the *next* verification step takes up that of the last accepted one. Two things follow in vLLM 0.29:

prefix caching      caches a state that rejected tokens were written over (vLLM issue 53912: other text, without a word; on a
                    CPU two of its kernels are missing, so the engine dies). It is turned off, and so is asynchronous
                    scheduling, which that issue names, too: no CPU engine has it, so nothing was shown with it.
fewer drafted       a step without drafts takes up the first state, whatever was accepted before it (``gdn_attn.py``), and one
tokens in flight    with fewer than before finds its convolution too short. So all batch sizes draft alike, nothing is dropped
                    in the middle of a phase, a table with fewer waits until no request is in flight, a request of the control
                    group is plain from its first token on, and methods that often find no draft are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from spec_plugin.engine_class import keeps_states
from spec_plugin.errors import SpecConfigError
from spec_plugin.events import Schedule

logger = logging.getLogger(__name__)

TURNED_OFF = ("enable_prefix_caching", "async_scheduling")


class RecurrentStates(SpecConfigError):
    """The target keeps recurrent states, and nobody has asked to try it."""


def check_states(hf: Mapping[str, Any], ragged: bool, method: str, tried: bool) -> None:
    """Refuse a target with states where it is not to be tried, and a method that drafts now and then for it anyhow.

    Args:
        hf: the target's config.json.
        ragged: does the method propose another number of tokens for each request, often none.
        method: its name, for the message.
        tried: the option ``recurrent_states`` says so.

    Raises:
        SpecConfigError: in one sentence.
    """
    if keeps_states(hf) and not tried:
        raise RecurrentStates(
            "this target keeps recurrent states (gated delta nets, Mamba), and drafting for those has been shown in no whole run "
            "yet: set spec.recurrent_states=try, which turns the engine's prefix caching and asynchronous scheduling off and "
            "lets the self-test judge, or leave the flag out"
        )
    if ragged and keeps_states(hf):
        raise SpecConfigError(
            f"spec.method={method} drafts for some steps of a request and not for others, and this target keeps recurrent "
            "states, which vLLM then takes up at the wrong token: set spec.method to one that drafts at every step"
        )


def turned_off(given: Mapping[str, Any]) -> dict[str, bool]:
    """The engine options to add for a target with states.

    Args:
        given: the trainer's engine arguments; where they are silent, vLLM may turn them on.
    """
    for name in TURNED_OFF:
        if given.get(name):
            logger.warning(
                "spec-plugin: %s=True is set to False: this target keeps recurrent states (vLLM issue 53912)", name
            )
    return dict.fromkeys(TURNED_OFF, False)


def for_states(wanted: Schedule, current: int, in_flight: bool) -> Schedule:
    """The schedule that keeps states right: one k for all batch sizes, and no smaller one while requests are in flight.

    Args:
        wanted: by the controller; the k is the smallest of its table, so that no batch size is slower than plain decoding.
        current: k that is in force.
        in_flight: are there requests that may have drafted with it.
    """
    k = min(wanted.table[1:], default=0)
    if in_flight:
        k = max(k, current)
    return Schedule((k,) * len(wanted.table))
