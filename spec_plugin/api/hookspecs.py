"""Every hook of spec-plugin. To write a plugin, read this page and nothing else.

A plugin is any object (module, class instance) with functions named after these hooks and marked with ``hookimpl``::

    from spec_plugin import hookimpl

    @hookimpl
    def spec_rollout_end(stats):
        print(f"{stats.tokens} tokens, acceptance length {stats.acceptance_length}")

Publish it under the entry point group ``spec_plugin``; it is found in every process of the trainer. A hook may take any
subset of the arguments listed here. The built-in behaviour (methods ``eagle3``, ``draft_model``, ``mtp``, ``suffix``,
``ngram``, the draft trainer ``trainer``, the guards ``provenance`` and ``exactness``, the break-even ``controller`` and the
sink ``metrics``) goes through the same door and can be blocked by name with ``spec.block=[name]``; a plugin that registers
under the name of a blocked one replaces it.

Which process calls what: ``A`` the actor process (draft training, harvest, log-prob checks), ``S`` the process that
builds the engine. Failures: an exception turns speculation off and training goes on, except ``SpecConfigError``,
``LosslessError``, ``LogprobProvenanceError`` and ``PatchError``, which stop the run (also as the cause of another), and any
exception from ``spec_method``, ``spec_configure`` (nothing has started yet), ``spec_check_logprobs`` and ``spec_check_stated``
(law 3). An answer of another type than is written here counts as an exception. One from ``spec_metrics`` or ``spec_save``, on
which no draft depends, is a warning, and drafts go on; so is a metric that is no finite number.
A wrapper (``hookimpl(wrapper=True)``) may change any answer, but nothing may swallow what a guard has raised (law 3).
Every call and kind of failure: ``tests/unit/session/test_law6_table.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    from spec_plugin.api.config import SpecConfig
    from spec_plugin.api.events import (
        DraftRefresh,
        HiddenStates,
        LogprobBatch,
        RefreshReport,
        RolloutStats,
        Schedule,
        SelfTestReport,
        StatedLogprobs,
        TargetInfo,
        WeightSync,
    )
    from spec_plugin.api.method import Method

PROJECT = "spec_plugin"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def spec_method(config: SpecConfig, target: TargetInfo) -> Method | None:
    """(A, S) Before all else: how to draft, if ``config.method`` is yours; else None, which leaves it to the next plugin.

    What vLLM is told must pass the lossless allow-list (``spec_plugin.engine.lossless``), whoever returned it. Called again
    and again, also by ``spec-plugin check``: do nothing here that takes long, and write nothing.

    Raises:
        SpecConfigError: if this method cannot work with this target; say which option, its value, and what to set instead.
    """


@hookspec
def spec_configure(config: SpecConfig, target: TargetInfo, method: Method) -> None:
    """(A, S) The session starts. Validate, keep what you need, refuse early.

    Raises:
        SpecConfigError: if the run cannot work; say which option, its value, and what to set instead.
    """


@hookspec
def spec_engine_ready(report: SelfTestReport) -> None:
    """(A) The start-up self-test passed on the engine that will roll out; ``report.break_even`` holds what it measured."""


@hookspec
def spec_rollout_start(policy_version: int) -> None:
    """(A) Generation with this policy version may begin."""


@hookspec
def spec_rollout_end(stats: RolloutStats) -> None:
    """(A) Generation of one step is complete; counters are differences over the phase.

    Where rollouts go on while the trainer trains, a phase lasts until the next weight sync, and this comes right before it.
    """


@hookspec(firstresult=True)
def spec_slowdown_without_drafts(stats: RolloutStats) -> float | None:
    """(A) After ``spec_rollout_end``: how many times as long this engine's steps would have taken without drafts.

    Of several engines that of the slowest is asked for; ``spec/saved_s`` is reckoned from it.

    Returns:
        A number above 0, 1.0 where nothing was drafted; or None where you do not know, which leaves it to the next plugin.
    """


@hookspec(firstresult=True)
def spec_can_pay() -> bool | None:
    """(A) After ``spec_rollout_end``: may drafts come to pay, by this rollout or by one soon.

    Returns:
        False: until you are asked behind the next rollout nothing is harvested, trained, refreshed or drafted; True; or None for
        "no opinion", which leaves it to the next plugin.
    """


@hookspec
def spec_target_forward(hidden: HiddenStates) -> None:
    """(A) A forward pass that the trainer ran anyway has been harvested. Copy what you keep: the tensors may be reused."""


@hookspec
def spec_check_logprobs(batch: LogprobBatch) -> None:
    """(A) Log-probs are about to enter the loss.

    Raises:
        LogprobProvenanceError: if any of them is not the target's at the recorded policy version.
    """


@hookspec
def spec_check_stated(batch: StatedLogprobs) -> None:
    """(A) Log-probs that the engine stated are about to enter the loss, and the trainer recomputes none of this batch.

    A few sequences of the same step, recomputed for that purpose, come to ``spec_check_logprobs``.

    Raises:
        LogprobProvenanceError: if any of them is no log-prob, or of another policy version than may be.
    """


@hookspec(firstresult=True)
def spec_head_start() -> float | None:
    """(A) Before ``spec_train_draft``: seconds that the slice may take beyond its share; the largest of all ranks' answers holds.

    Returns:
        Seconds, 0 for none; or None for "no opinion", which leaves it to the next plugin.
    """


@hookspec
def spec_train_draft(step: int, seconds: float) -> None:
    """(A) The trainer's own update is done: one slice of draft training, of at most ``seconds`` wall-clock seconds."""


@hookspec
def spec_weight_sync(event: WeightSync) -> None:
    """(A) Target weights of a new policy version have reached the engine."""


@hookspec(firstresult=True)
def spec_draft_weights(event: WeightSync) -> DraftRefresh | None:
    """(A) Right after ``spec_weight_sync``, at the same safe point: the draft weights to install, or None to keep the old."""


@hookspec
def spec_refreshed(refresh: DraftRefresh, report: RefreshReport) -> None:
    """(A) The engine has installed, or refused, this refresh."""


@hookspec
def spec_recover() -> None:
    """(A) Draft work failed some steps ago, and gets a fresh start with this weight sync: drop what may be half done.

    Called on every rank, before ``spec_weight_sync``. The phase that follows is plain; the draft is sent, and the engine tested,
    at the next weight sync.
    """


@hookspec(firstresult=True)
def spec_schedule(policy_version: int) -> Schedule | None:
    """(A) After the refresh: how many tokens to draft for each batch size, for the coming rollout phase.

    Returns:
        A table with ``table[b]`` = k for b running requests, ``len(table) == max_num_seqs + 1``, 0 = plain decoding, and
        optionally the break-even for each; or None for "no opinion" (the engine keeps its table).
    """


@hookspec
def spec_metrics() -> Mapping[str, float]:  # type: ignore[empty-body]
    """(A) The trainer logs a step: return finite floats under ``spec/…`` names; results of all plugins are merged."""


@hookspec
def spec_save(path: Path) -> None:
    """(A) The trainer saves a checkpoint: write into this folder, which is yours, atomically, safetensors and JSON only."""


@hookspec
def spec_load(path: Path) -> None:
    """(A) The trainer resumes: ``path`` is the folder that ``spec_save`` wrote, wherever it lies now, and may be missing."""
