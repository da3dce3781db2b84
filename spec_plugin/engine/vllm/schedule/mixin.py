"""What our schedulers add to vLLM's: one mix-in, whose parts act in the order written in each method.

=====================  =============================================================================================
part                   what it does
=====================  =============================================================================================
``spec_steps``         times decoding steps (``steps``)
``spec_pairs``         leaves drafts out for a few steps, to time them beside drafted ones (``pairs``)
``spec_cutoff``        drops a draft that does not pay (``cutoff``)
``spec_preemption``    preempts requests whose recurrent states would be wrong (``preemption``); None: no such target
plain requests         have no drafts, and others no more than the table says (functions in ``plain``)
=====================  =============================================================================================

The parts know nothing of each other, nor of vLLM's classes: this module imports none.
"""

from __future__ import annotations

import time
from typing import Any

from spec_plugin.engine.vllm.additional import own_settings
from spec_plugin.engine.vllm.schedule.cutoff import DraftCutoff, undrafted_beside_drafts
from spec_plugin.engine.vllm.schedule.pairs import PairedSteps
from spec_plugin.engine.vllm.schedule.pause import pause_in_workers
from spec_plugin.engine.vllm.schedule.plain import clear_plain, keep_to_table
from spec_plugin.engine.vllm.schedule.preemption import PreemptWhereDraftsEnd
from spec_plugin.engine.vllm.schedule.steps import StepLog


class SpecSchedulerMixin:
    """Put before ``Scheduler`` or ``AsyncScheduler`` of vLLM; what it adds to them begins with ``spec``."""

    vllm_config: Any
    requests: dict[str, Any]
    num_spec_tokens: int
    use_eagle: bool
    block_size: int
    dynamic_sd_lookup: list[int] | None  # k by batch size, which vLLM reads at each step
    has_unfinished_requests: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = own_settings(self.vllm_config)
        self.spec_steps = StepLog(bool(settings.get("variable_length")), self._spec_dropped)
        self.spec_pairs = PairedSteps(bool(settings.get("variable_length")))
        self.spec_cutoff = DraftCutoff([], ())  # until a table is set: never
        self.spec_preemption = PreemptWhereDraftsEnd() if self.vllm_config.model_config.is_hybrid else None
        #: did all workers pause their draft when last asked
        self.spec_paused = False
        #: vLLM's executor, by which the workers are reached; whoever sets a cut-off hands it over
        self.spec_executor: Any = None
        #: queues of the requests that stand aside (``utilities.spec_stand_aside``)
        self.spec_aside: tuple[Any, ...] | None = None
        self._spec_batch = 0  # requests in the step whose output is being taken up
        #: drafted tokens accepted of the request whose output is being taken up; None: it had no draft
        self._spec_accepted: int | None = None

    @property
    def _spec_dropped(self) -> int:
        """Tokens of a hit in the prefix cache that vLLM drops: the last block, in which the draft may have read another token.

        Where a hit is that one block, none of it is left, and the step log does not see that there was one.
        """
        drops = getattr(self, "use_eagle_block_drop", self.use_eagle)  # a word of its own since vLLM 0.31
        return int(self.block_size) if drops and self.vllm_config.cache_config.enable_prefix_caching else 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own; before it requests may be preempted, and the step before it is over."""
        now = time.perf_counter()
        self.spec_pairs.note(self.spec_steps.end(now))
        if self.spec_preemption is not None:
            self.spec_preemption.preempt(self)
        table = self.dynamic_sd_lookup
        self.dynamic_sd_lookup = lookup = self._spec_lookup
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.dynamic_sd_lookup = table
        if self.spec_preemption is not None:
            self.spec_preemption.note(self.requests, output)
        self.spec_steps.begin(output, lookup or (), now, self.spec_paused)
        return output

    @property
    def _spec_lookup(self) -> list[int] | None:
        """The table as the step under way has it: without drafts in a stretch that is timed plainly."""
        table = self.dynamic_sd_lookup
        return [0] * len(table) if table is not None and self.spec_pairs.plain else table

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """vLLM's own, which under asynchronous scheduling hands out placeholders for drafts."""
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]
        clear_plain(self.requests, scheduler_output.num_scheduled_tokens)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """vLLM's own, which under synchronous scheduling hands out the drafts themselves."""
        super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]
        clear_plain(self.requests, draft_token_ids.req_ids)
        keep_to_table(self.requests, draft_token_ids.req_ids, self._spec_lookup)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's own; afterwards the draft may be dropped, and the engine may wait if nothing is left to run."""
        self._spec_batch = len(scheduler_output.num_scheduled_tokens)
        result = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if self.spec_steps.variable_length:
            for _ in range(undrafted_beside_drafts(scheduler_output)):
                self.spec_cutoff.emitted(self._spec_batch, 1)
        if self.spec_cutoff.due and self.spec_cutoff.drop():
            self.spec_paused = pause_in_workers(self.spec_executor, True)
        if not self.has_unfinished_requests():
            self.spec_steps.interrupt(time.perf_counter())
        return result

    def set_pause_state(self, pause_state: Any) -> None:
        """vLLM's own; the step before a pause ends here, and not with the first one behind it."""
        self.spec_steps.interrupt(time.perf_counter())
        super().set_pause_state(pause_state)  # type: ignore[misc]

    def make_spec_decoding_stats(
        self, stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        """vLLM's own, which it calls for each drafted request of a step, before it looks where the response ends."""
        self._spec_accepted = num_accepted_tokens if num_draft_tokens else None
        return super().make_spec_decoding_stats(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)  # type: ignore[misc]

    def _update_request_with_output(self, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any) -> Any:
        """vLLM's own, which cuts what lies beyond the response's end; the cut-off and the step log note what is left."""
        accepted, self._spec_accepted = self._spec_accepted, None
        found = super()._update_request_with_output(request, new_token_ids, *args, **kwargs)  # type: ignore[misc]
        if accepted is not None:
            kept = max(1, len(found[0]))
            self.spec_cutoff.emitted(self._spec_batch, kept)
            self.spec_steps.accept(accepted, min(accepted, kept - 1))
        return found
