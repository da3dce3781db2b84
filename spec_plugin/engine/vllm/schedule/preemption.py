"""Requests of a target with recurrent states are preempted where their drafts end: their states stand at another token.

A verification step leaves one state behind each of its tokens, and only a verification step takes up that of the last
accepted one (vLLM 0.29). A step without drafts takes up the first, whatever was accepted: wrong text from there on, on every
device, without a word. One with fewer drafts than the engine's k is right on a card, but the convolution of vLLM's CPU
kernels then reads at the wrong place, or dies. vLLM schedules such steps by itself:

the end of the context   drafts are cut to what ``max_model_len`` leaves, down to none in the last step
a full step              and to what ``max_num_batched_tokens`` leaves

So drafts are verified whole or not at all, and a request that had some and gets none is preempted, vLLM's own way: all of it
is a prompt again, whose state is right, and it goes on plain. Costs one prefill for a request that fills its context.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any


class PreemptWhereDraftsEnd:
    """For the scheduler of a target that keeps states: ``preempt`` before each step, ``note`` behind it."""

    def __init__(self) -> None:
        self._drafted: set[str] = set()  # ids of requests that verified drafts when they were last scheduled

    def preempt(self, scheduler: Any) -> None:
        """Set back those running requests that would take up a wrong state in the step that vLLM is about to schedule."""
        if scheduler._pause_state.name == "PAUSED_ALL":
            return
        for request in list(self._ending(scheduler)):
            self._set_back(scheduler, request)

    def note(self, requests: Mapping[str, Any], output: Any) -> None:
        """Who verifies drafts in this step.

        Args:
            requests: the scheduler's, by id; those that are gone are forgotten.
            output: vLLM's ``SchedulerOutput``.
        """
        self._drafted.difference_update(output.num_scheduled_tokens)
        self._drafted.update(name for name, tokens in output.scheduled_spec_decode_tokens.items() if tokens)
        self._drafted.intersection_update(requests)

    def _ending(self, scheduler: Any) -> Iterator[Any]:
        """Running requests that had drafts, and will have none in this step; drafts that vLLM would cut are taken away."""
        budget = _Budget(scheduler)
        for request in scheduler.running:
            room = budget.room(request)
            wanted = request.num_tokens_with_spec - request.num_computed_tokens
            # of a request without room nothing is scheduled: it keeps its drafts for a later step
            if room > 0 and request.spec_token_ids and (wanted > room or len(request.spec_token_ids) < budget.k):
                wanted -= len(request.spec_token_ids)
                request.spec_token_ids = []
            if room > 0 and request.request_id in self._drafted and not request.spec_token_ids:
                yield request
            else:
                budget.spend(min(wanted, room))

    def _set_back(self, scheduler: Any, request: Any) -> None:
        """Preempt one request as ``reset_prefix_cache`` does all: it waits as if it had just arrived."""
        scheduler.running.remove(request)
        scheduler._preempt_request(request, time.monotonic())
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        self._drafted.discard(request.request_id)


class _Budget:
    """Tokens that vLLM has left for each running request of the step to come, as ``Scheduler.schedule`` counts them."""

    def __init__(self, scheduler: Any) -> None:
        speculative = scheduler.vllm_config.speculative_config
        self.k: int = scheduler.num_spec_tokens
        self._slots: int = speculative.max_num_new_slots_for_drafting if speculative is not None else 0
        self._tokens: int = scheduler.max_num_scheduled_tokens
        self._inputs: int = scheduler.scheduler_config.max_num_batched_tokens
        self._longest: int = scheduler.scheduler_config.long_prefill_token_threshold or self._tokens
        self._context: int = scheduler.max_model_len - scheduler.num_sampled_tokens_per_step

    def room(self, request: Any) -> int:
        """Tokens that may be scheduled for ``request``; never below 0."""
        context: int = self._context - request.num_computed_tokens
        return max(0, min(self._longest, self._tokens, self._inputs - self._slots, context))

    def spend(self, tokens: int) -> None:
        """Take the tokens scheduled for one request off the budget."""
        if tokens:
            self._tokens -= tokens
            self._inputs -= tokens + self._slots
