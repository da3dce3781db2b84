"""A plugin that records what the hooks of a real run carry, so that the checks can judge it afterwards."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Generator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draft_training import digest as weights_digest
from draft_training.weights import read_tensors
from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import LogprobProvenanceError
from spec_plugin.api.events import (
    DraftRefresh,
    Drafts,
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
from spec_plugin.api.hookspecs import hookimpl
from spec_plugin.api.method import Memory, Method
from spec_plugin.api.rollouts import Rollout
from spec_plugin.policy.provenance import ProvenanceGuard, by_lag
from spec_plugin.policy.provenance.rules import ENOUGH, Precision
from spec_plugin.policy.provenance.windows import difference
from spec_plugin_conformance.journal import Journal
from spec_plugin_conformance.named import watch_named
from spec_plugin_conformance.plants import PlantedErrors
from spec_plugin_conformance.sessions import session_of, watch_sessions
from spec_plugin_conformance.watch import (
    CONFIGURATION,
    Write,
    sampling_of,
    watch_engine,
    watch_harvests,
    watch_metrics,
    watch_updates,
)

#: packs of hidden states that one process keeps
PACKS = 8


#: phases of plain text that a guard is shown before an error
_AS_PLAIN = 5

watch_sessions()


class Recorder:
    """One JSON line per hook call in ``<folder>/<pid>.jsonl``, what ``watch`` sees, and the first hidden states.

    Loaded by ``spec.plugins=["spec_plugin_conformance.recorder:Recorder=<folder>"]``.
    """

    def __init__(self, folder: str) -> None:
        """Write into this folder, which may be missing."""
        self._folder = Path(folder)
        journal = Journal(self._folder)
        self._session, self._write = journal.session, journal.write
        self._packs = 0
        self._head: Tensor | None = None  # [V, H] of the policy that the engine has
        self._announced: dict[str, tuple[Tensor, str]] = {}  # what the last weight sync carried, and its digest
        self._training = False  # the draft, now

    @hookimpl(wrapper=True)
    def spec_method(self) -> Generator[None, Method | None, Method | None]:
        method = yield
        if method is None:
            return None
        original, memory = method.model, method.memory

        def model() -> Path | str | None:
            self._write("spec_method")
            watch_engine(PlantedErrors(self._folder), self._write)  # if it has come only now
            return original()

        return replace(method, model=model, memory=None if memory is None else _RecordedMemory(memory, self._write))

    @hookimpl
    def spec_configure(self, config: SpecConfig, target: TargetInfo, method: Method) -> None:
        self._config, self._target = config, target
        watch_engine(PlantedErrors(self._folder), self._write)
        watch_updates(self._write, lambda: self._training)
        if (session := session_of(self)) is not None:
            watch_metrics(session, self._write)
            watch_harvests(session, self._write)
            watch_named(session, self._write)
            session.auditors.append(lambda state: self._write("audit", **asdict(state)))
        self._write(
            "spec_configure",
            method=config.method,
            k=config.k,
            dtype=target.dtype,
            actor_dtype=target.actor_dtype,
            sampling=sampling_of(target.sampling),
            engine={name: getattr(target, name) for name in CONFIGURATION},
            aux_layers=list(method.harvest or ()),
        )

    @hookimpl
    def spec_engine_ready(self, report: SelfTestReport) -> None:
        self._write("spec_engine_ready", checks=[asdict(c) for c in report.checks], seconds=report.seconds)

    @hookimpl
    def spec_rollout_start(self, policy_version: int) -> None:
        self._write("spec_rollout_start", policy_version=policy_version)

    @hookimpl
    def spec_rollout_end(self, stats: RolloutStats) -> None:
        self._write("spec_rollout_end", **asdict(stats))

    @hookimpl
    def spec_target_forward(self, hidden: HiddenStates) -> None:
        name = None
        # log-probs are those of the run's temperature
        head = None if self._head is None else self._head * Precision.of(self._target).scale
        if self._packs < PACKS:
            name = f"{os.getpid()}-{self._session}-{self._packs}.safetensors"
            self._packs += 1
            tensors = {"input_ids": hidden.input_ids, "aux": hidden.aux, "last": hidden.last}
            tensors |= {"loss_mask": hidden.loss_mask, "lengths": torch.tensor(hidden.lengths)}
            tensors["offsets"] = torch.tensor(hidden.offsets, dtype=torch.int64)
            tensors["policy_version"] = torch.tensor(hidden.policy_version)
            save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, self._folder / name)
        self._write(
            "spec_target_forward",
            policy_version=hidden.policy_version,
            lengths=list(hidden.lengths),
            offsets=list(hidden.offsets),
            aux=list(hidden.aux.shape),
            last=list(hidden.last.shape),
            dtype=str(hidden.last.dtype).removeprefix("torch."),
            log_probs=None if head is None else log_probs_of(hidden, head),
            pack=name,
        )

    @hookimpl
    def spec_check_logprobs(self, batch: LogprobBatch) -> None:
        both = {"rollout": batch.rollout, "recomputed": batch.recomputed}
        self._write(
            "spec_check_logprobs",
            policy_version=batch.policy_version,
            response_lengths=batch.mask.sum(-1).tolist(),
            rollout=batch.rollout is not None,
            rows={name: None if v is None else rows_of(v, batch.mask) for name, v in both.items()},
            rollout_dtype=None if batch.rollout is None else str(batch.rollout.dtype).removeprefix("torch."),
            lag_allowed=batch.lag_allowed,
            versions=versions_in_order(batch),
            differences=differences(batch),
            speculating=batch.speculating,
            rollout_in_loss=batch.rollout_in_loss,
            plain=int(((batch.drafted == Drafts.CONTROL) & batch.mask).sum()),
            caught={name: self._violates(mutant, batch) for name, mutant in mutants(batch, self._vocab_size).items()},
        )

    @hookimpl
    def spec_check_stated(self, batch: StatedLogprobs) -> None:
        self._write(
            "spec_check_stated",
            policy_version=batch.policy_version,
            response_lengths=batch.mask.sum(-1).tolist(),
            rollout=True,
            rows={"rollout": rows_of(batch.rollout, batch.mask)},
            rollout_dtype=str(batch.rollout.dtype).removeprefix("torch."),
            lag_allowed=batch.lag_allowed,
        )

    @property
    def _vocab_size(self) -> int:
        return int(self._target.hf_config["vocab_size"])

    def _violates(self, batch: LogprobBatch, honest: LogprobBatch) -> bool:
        """True if a guard that knows the honest batch as plain text refuses this one, as text of a phase with drafts.

        Several times over: a handful of sequences is judged together with the next ones.
        """
        guard = ProvenanceGuard()
        guard.spec_configure(config=self._config, target=self._target)
        try:
            if batch is not honest:
                for _ in range(_AS_PLAIN):
                    guard.spec_check_logprobs(batch=_with_drafts(honest, Drafts.OFF))
            for _ in range(ENOUGH):
                guard.spec_check_logprobs(batch=_with_drafts(batch, Drafts.ON))
        except LogprobProvenanceError:
            return True
        return False

    @hookimpl(wrapper=True)
    def spec_train_draft(self, step: int, seconds: float) -> Generator[None, Any, Any]:
        changed = [name for name, (tensor, was) in self._announced.items() if self._digest(tensor) != was]
        self._write("spec_train_draft", step=step, seconds=seconds, changed=changed)
        self._training = True
        try:
            return (yield)
        finally:
            self._training = False

    @hookimpl
    def spec_recover(self) -> None:
        self._write("spec_recover")

    @hookimpl
    def spec_weight_sync(self, event: WeightSync) -> None:
        self._head = None if event.lm_head is None else event.lm_head.detach().float().cpu().clone()
        shared = {"embed": event.embed, "head": event.lm_head}
        shapes = {name: None if t is None else list(t.shape) for name, t in shared.items()}
        digests = {name: "" if t is None else self._digest(t) for name, t in shared.items()}
        names = {"embedding": "embed", "head": "head"}
        self._announced = {n: (t, digests[short]) for n, short in names.items() if (t := shared[short]) is not None}
        digest_fields = {f"{name}_digest": digest for name, digest in digests.items()}
        self._write("spec_weight_sync", policy_version=event.policy_version, **shapes, **digest_fields)

    def _digest(self, tensor: Tensor) -> str:
        """sha256 of a tensor in the engine's dtype, as the engine computes its own."""
        return weights_digest({"": tensor.to(getattr(torch, self._target.dtype))})

    @hookimpl(wrapper=True)
    def spec_draft_weights(self, event: WeightSync) -> Generator[None, DraftRefresh | None, DraftRefresh | None]:
        refresh = yield
        published = None if refresh is None else [refresh.draft_version, refresh.digest]
        self._write("spec_draft_weights", policy_version=event.policy_version, published=published)
        return refresh

    @hookimpl
    def spec_refreshed(self, refresh: DraftRefresh, report: RefreshReport) -> None:
        sent = {"sent_version": refresh.draft_version, "sent_digest": refresh.digest}
        self._write("spec_refreshed", policy_version=refresh.policy_version, **sent, **asdict(report))

    @hookimpl(wrapper=True)
    def spec_schedule(self, policy_version: int) -> Generator[None, Schedule | None, Schedule | None]:
        schedule = yield
        self._write("spec_schedule", policy_version=policy_version, k=max(schedule.table) if schedule else None)
        return schedule

    @hookimpl
    def spec_metrics(self) -> dict[str, float]:
        session = session_of(self)
        self._write("spec_metrics", failure=None if session is None else session.failure)
        return {}

    @hookimpl(trylast=True)
    def spec_save(self, path: Path) -> None:
        self._write("spec_save", path=str(path), saved=self._saved(path / "draft"))

    def _saved(self, folder: Path) -> list[Any] | None:
        """Version and digest of the draft in a checkpoint, as a refresh would publish it; None where it holds none."""
        about, file = folder / "trainer.json", folder / "draft" / "model.safetensors"
        if not (about.exists() and file.exists()):
            return None
        dtype = getattr(torch, self._target.dtype)
        sent = {n: t.to(dtype) if t.is_floating_point() else t for n, t in read_tensors(file).items()}
        return [json.loads(about.read_text())["draft_version"], weights_digest(sent)]

    @hookimpl
    def spec_load(self, path: Path) -> None:
        self._write("spec_load", path=str(path), found=path.exists())


class _RecordedMemory:
    """A method's memory, whose calls are recorded."""

    def __init__(self, memory: Memory, write: Write) -> None:
        self._memory, self._write = memory, write

    def keep(self, rollouts: Sequence[Rollout]) -> None:
        self._write("memory_keep", rollouts=len(rollouts))
        self._memory.keep(rollouts)

    def recall(self) -> Sequence[Rollout]:
        rollouts = self._memory.recall()
        self._write("memory_recall", rollouts=len(rollouts))
        return rollouts


def log_probs_of(hidden: HiddenStates, head: Tensor) -> list[list[float]]:
    """Log-probs that the harvested states give the sampled tokens of each document, but for its first token.

    Args:
        hidden: as harvested.
        head: [V, H] float32 LM head of the policy, divided by the temperature.
    """
    found, begin = [], 0
    for length in hidden.lengths:
        place = slice(begin, begin + length)
        begin += length
        ids, sampled = hidden.input_ids[place].cpu(), hidden.loss_mask[place].cpu()
        logits = hidden.last[place].detach().float().cpu() @ head.T
        of_next = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        found.append(of_next[sampled[1:]].tolist())
    return found


def rows_of(values: Tensor, mask: Tensor) -> list[list[Any]]:
    """The values [B, T] where mask [B, T] is True, sequence by sequence."""
    return [row[keep].tolist() for row, keep in zip(values, mask, strict=True)]


def versions_in_order(batch: LogprobBatch) -> list[list[int]]:
    """Policy versions of each sequence's tokens, in order, repetitions in a row left out."""
    return [[version for version, _ in itertools.groupby(row)] for row in rows_of(batch.versions, batch.mask)]


def differences(batch: LogprobBatch) -> dict[int, float]:
    """Mean |rollout - recomputed| in nats, by lag; empty without rollout log-probs."""
    if batch.rollout is None:
        return {}
    diff = difference(batch.recomputed, batch.rollout, batch.mask)
    return {lag: float(diff[part.mask].double().mean()) for lag, part in by_lag(batch) if part.mask.any()}


def mutants(batch: LogprobBatch, vocab_size: int) -> dict[str, LogprobBatch]:
    """The batch unchanged, and copies with one planted error each: NaN, wrong log-probs, a stale version."""
    uniform = torch.full_like(batch.recomputed, -float(torch.tensor(float(vocab_size)).log()))
    # an asynchronous trainer may lag behind, but never be ahead
    other = batch.policy_version + (1 if batch.lag_allowed or batch.policy_version == 0 else -1)
    found = {
        "unchanged": batch,
        "nan recomputed": replace(batch, recomputed=_with_nan(batch.recomputed, batch.mask)),
        "stale versions": replace(batch, versions=torch.full_like(batch.versions, other)),
    }
    if batch.rollout is not None:
        found["nan rollout"] = replace(batch, rollout=_with_nan(batch.rollout, batch.mask))
        found["another model"] = replace(batch, rollout=uniform)
        found["the next token"] = replace(batch, rollout=batch.rollout.roll(-1, dims=-1))
    return found


def _with_drafts(batch: LogprobBatch, drafts: Drafts) -> LogprobBatch:
    return replace(batch, drafted=torch.full_like(batch.drafted, drafts))


def _with_nan(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out = values.clone()
    row, column = mask.nonzero()[0].tolist()
    out[row, column] = float("nan")
    return out
