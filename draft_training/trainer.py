"""DraftTrainer: trains one draft online in bounded slices of time, beside a trainer whose state it never touches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from draft_training.batch import Document, PackedBatch, pack, portions
from draft_training.buffer import HiddenBuffer
from draft_training.card import HostOffload, Resident, host_memory, own_modes
from draft_training.draft import DraftShape
from draft_training.errors import DraftConfigError
from draft_training.kinds import kind_of
from draft_training.layers import initialise
from draft_training.loss import LossStats, ttt_loss
from draft_training.optimizer import DraftOptimizer
from draft_training.parallel import Ranks
from draft_training.parts import Part
from draft_training.proposals import ProposalStats, Sampled, replay_proposals
from draft_training.report import Evaluation, SliceReport
from draft_training.schedule import TrainingSchedule
from draft_training.settings import TrainSettings
from draft_training.state import TrainerState, read_state, state_from_first, write_state

#: to the count of a token that is in the vocabulary: less than any occurrence counts
_TIES = 2.0**-30


class DraftTrainer:
    """Owns the draft, its optimizer and its random stream; the policy's tensors are copies.

    Neither the global random streams nor the caller's grad, inference or autocast mode are touched. With a
    ``process_group`` every method marked *collective* must be called by all its ranks; gradients and raw sums are added
    over the ranks, so all hold the same draft bit by bit.
    """

    def __init__(
        self,
        config: DraftShape,
        settings: TrainSettings,
        *,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        seed: int,
        process_group: dist.ProcessGroup | None = None,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Create a draft (collective).

        Args:
            config: its shape.
            settings: how it is trained.
            device: where it is trained.
            dtype: of its parameters and optimizer state.
            seed: of its own random stream, the same on all ranks.
            process_group: data-parallel ranks that train one draft; None: this process alone.
            tensors: weights to start from, as ``load_draft`` returns them; None: a new draft.

        Raises:
            DraftConfigError: if ``tensors`` do not match.
        """
        self.config, self.settings, self.device = config, settings, torch.device(device)
        self.schedule = TrainingSchedule(settings, newborn=tensors is None)
        self.draft_version = 0  # optimizer steps taken
        self.policy_version = -1  # of the last update_policy
        self._ranks, self._dtype = Ranks(process_group, self.device), dtype
        self._generator = torch.Generator(device="cpu").manual_seed(seed)
        self._embed: Tensor | None = None
        self._lm_head: Tensor | None = None
        self._step_seconds: float | None = None
        with own_modes(self.device):
            with self._ranks.all_or_none():
                self.kind = kind_of(config)
                self.draft = self.kind.build(self.device, dtype)
                initialise(self.draft, self._generator)
                if config.pruned:
                    self.draft.lm_head.weight.requires_grad_(False)
                if tensors is not None:
                    self.install(tensors)
            self._ranks.overwrite_from_first(self.draft.state_dict().values())
            self._trained = {n: p for n, p in self.draft.named_parameters() if p.requires_grad}
            self._optimizer = DraftOptimizer(self._trained, settings)
        self._resident = Resident(self.device)
        self._offload = (
            HostOffload(
                self.device,
                changing=lambda: self._optimizer.state().values(),
                # of the policy's embedding some rows are enough, see ``Resident``
                constant=lambda: () if self._lm_head is None else (self._lm_head,),
                rounded=self._optimizer.momenta,
            )
            if settings.offload
            else None
        )
        self._working = 0  # blocks of ``working`` around the present one

    @property
    def ranks(self) -> int:
        """Number of ranks that train this draft together."""
        return self._ranks.count

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around several slices and evaluations: what rests between slices is brought to the device once for all (collective).

        What fails in the block on one rank is raised on all of them.
        """
        with own_modes(self.device), self._ranks.all_or_none():
            outermost = self._working == 0
            with self._offload.on_device() if self._offload and outermost else nullcontext():
                self._working += 1
                try:
                    yield
                finally:
                    self._working -= 1
                    if outermost:
                        self._resident.forget()

    def install(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the draft's weights, converting their dtype; the optimizer's state is kept.

        Raises:
            DraftConfigError: if names or shapes do not match the config.
        """
        self.kind.check(tensors)
        with torch.no_grad():
            for name, tensor in self.draft.state_dict().items():
                tensor.copy_(tensors[name])

    def update_policy(self, embed: Tensor, lm_head: Tensor, policy_version: int) -> None:
        """Copy the policy's embedding and LM head, [V, H] each; a pruned head follows the policy's rows.

        On a GPU the copies keep their dtype; on a CPU they take the draft's, since half precision is slow there.

        Raises:
            DraftConfigError: if a shape is not [V, H].
        """
        shape = (self.config.vocab_size, self.config.hidden_size)
        for name, tensor in (("embed", embed), ("lm_head", lm_head)):
            if tuple(tensor.shape) != shape:
                raise DraftConfigError(
                    f"the policy's {name} has shape {list(tensor.shape)}, the draft expects {list(shape)}"
                )
        with own_modes(self.device), torch.no_grad():
            tied = lm_head.data_ptr() == embed.data_ptr()
            old = self._lm_head if self._lm_head is not self._embed else None
            self._lm_head = self._copied(lm_head, old)
            # rows of it are looked up where it lies, so it may lie in the host's memory for good
            apart = self._embed if self._embed is not self._lm_head else None
            self._embed = self._lm_head if tied else self._copied(embed, apart, on_host=self.settings.offload)
            self.policy_version = policy_version
            if self.config.pruned:
                self.draft.refresh_head(self._lm_head)

    def select_vocabulary(self, token_counts: Tensor) -> None:
        """Choose the pruned vocabulary: the most frequent tokens, ties to those in it, then to the lower id (collective).

        The layer's weights do not depend on it, so it may be called at any time.

        Args:
            token_counts: [V] how often each token occurred; added over the ranks.
        """
        kept = self.draft.vocabulary()
        with own_modes(self.device), torch.no_grad():
            with self._ranks.all_or_none():
                counts = token_counts.to(self.device, torch.float64, copy=True)
            self._ranks.add_up(counts)
            counts[kept] += _TIES
            chosen = counts.argsort(descending=True, stable=True)[: len(kept)].sort().values
            if not chosen.equal(kept):
                self.draft.set_vocabulary(chosen)
                if self._lm_head is not None:
                    self.draft.refresh_head(self._lm_head)

    def train_slice(self, buffer: HiddenBuffer, seconds: float, max_steps: int) -> SliceReport:
        """Train for at most ``seconds`` and ``max_steps`` optimizer steps (collective).

        A step that by the measured cost of earlier ones would overrun is not begun; the very first one is, since its
        cost is unknown. When not even one step fits, the estimate is halved, so that one slow step does not end training
        for good. Ranks stop together; one whose buffer is empty takes part with zero positions.

        Raises:
            RuntimeError: before the first ``update_policy``.
        """
        began, steps, skipped, tokens = time.perf_counter(), 0, 0, 0
        with self.working():
            total = LossStats.zeros(self.schedule.shallow, self.device)
            while steps + skipped < max_steps and not self._ranks.any(self._would_overrun(began, seconds)):
                step_began = time.perf_counter()
                outcome = self._step(
                    lambda: buffer.sample(self.schedule.tokens(self.draft_version), self.settings.replay_share)
                )
                if outcome is None:
                    break
                finite, stats, step_tokens = outcome
                steps, skipped, tokens = steps + finite, skipped + (not finite), tokens + step_tokens
                if finite:
                    total = total + stats.first(self.schedule.shallow)  # of all steps alike
                took, before = time.perf_counter() - step_began, self._step_seconds
                self._step_seconds = took if before is None else (before + took) / 2
            if not steps + skipped and self._step_seconds is not None and seconds > 0:
                self._step_seconds /= 2
            spent = time.perf_counter() - began
            return SliceReport.of(total, steps=steps, tokens=tokens, skipped=skipped, seconds=spent)

    def evaluate(
        self,
        documents: Sequence[Document | Part] | Callable[[], Sequence[Document | Part]],
        steps: int | None = None,
        context: int = 0,
        sampling: Sampled | None = None,
    ) -> Evaluation:
        """Measure on documents how many tokens the engine would accept, without training the draft (collective).

        Args:
            documents: this rank's, or parts of them; may be empty. If a function, it is called where its failure on one rank is
                raised on all of them.
            steps: drafted tokens to unroll, the engine's k; None: ``settings.ttt_steps``.
            context: tokens before each part that the draft's attention may read.
            sampling: of the rollouts; None: measure greedy proposals alone, at fewer products with the head, see
                ``proposals.replay_proposals``.

        Raises:
            RuntimeError: before the first ``update_policy``.
        """
        began, unrolled = time.perf_counter(), steps or self.settings.ttt_steps
        how: dict[str, Any] = {"sampling": sampling, "cap": self.settings.logit_cap}
        with self.working(), torch.no_grad():
            total = ProposalStats.zeros(unrolled, sampling is not None, self.device)
            embed, lm_head = self._policy()
            found = documents() if callable(documents) else documents
            for portion in portions([self._placed(d, context) for d in found], self.settings.tokens_per_step):
                batch = pack(portion, self.device)
                total = total + replay_proposals(self.draft, batch, embed, lm_head, steps=unrolled, **how)
            tokens = torch.tensor([sum(map(len, found))], dtype=torch.float64, device=self.device)
            summed = self._ranks.sum(torch.cat([total.pack(), tokens]))
            proposals = ProposalStats.unpack(summed[:-1].cpu(), unrolled)
            return Evaluation(proposals, int(summed[-1]), time.perf_counter() - began)

    def _placed(self, wanted: Document | Part, context: int = 0) -> Document:
        """On the device: it, or the document that it is a part of, is moved there once in a block of ``working``."""
        embed, _ = self._policy()
        part = wanted if isinstance(wanted, Part) else Part(wanted, 0, len(wanted))
        return replace(part, document=self._resident.of(part.document, embed)).cut(context)

    def engine_tensors(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Copies of exactly the tensors to push to vLLM, on the trainer's device.

        Never ``embed_tokens``, and ``lm_head``, ``d2t``, ``t2d`` only with a pruned vocabulary: the rest is the
        target's, and pushing it would overwrite the target.

        Args:
            dtype: of the floating-point ones; None: the trainer's own.
        """
        with torch.no_grad():
            return {
                name: tensor.to(dtype or tensor.dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
                for name, tensor in self.draft.state_dict().items()
            }

    def save(self, path: str | Path, extra: Mapping[str, Any] | None = None) -> str:
        """Save draft, optimizer, versions and random stream, all or nothing; call it on one rank.

        Args:
            path: a folder; ``path/draft`` is served by vLLM as it is.
            extra: JSON-serialisable, handed back by ``load``; e.g. ``buffer.state_dict()``.

        Returns:
            The fingerprint of the draft's tensors in the trainer's dtype.
        """
        return write_state(path, self.state(), self.kind, asdict(self.settings), extra or {})

    def load(self, path: str | Path) -> dict[str, Any]:
        """Restore what ``save`` wrote; training then goes on bit by bit as if it had not stopped (collective).

        Only the first rank reads: the others may sit on nodes that do not have the folder. The current settings stay in force.
        ``update_policy`` must follow before training.

        Returns:
            The ``extra`` of ``save``.

        Raises:
            CheckpointError: if a file is missing, torn or not what its digest says; nothing has changed then.
            DraftConfigError: if the saved draft has another shape.
            OtherRankFailed: if one of these was raised on the first rank.
        """
        saved: TrainerState | None = None
        extra: dict[str, Any] = {}
        with self._ranks.all_or_none():
            if self._ranks.first:
                saved, extra = read_state(path, self.kind)
        self.restore(state_from_first(self._ranks, saved))
        return self._ranks.object_from_first(extra)

    def follow_first(self) -> None:
        """Go on with the first rank's draft, optimizer, versions and random stream: ranks may have parted (collective)."""
        if self._ranks.count > 1:
            self.restore(state_from_first(self._ranks, self.state() if self._ranks.first else None))

    def state(self) -> TrainerState:
        """All that training goes on from; see there for how long its tensors stay what they are."""
        return TrainerState(
            weights=self.draft.state_dict(),
            own={**self._optimizer.state(), "generator": self._generator.get_state()},
            draft_version=self.draft_version,
            policy_version=self.policy_version,
            newborn=self.schedule.newborn,
        )

    def restore(self, state: TrainerState) -> None:
        """Go on from a state, of which copies are taken.

        Raises:
            DraftConfigError: if it is of another shape of draft; nothing has changed then.
        """
        self.install(state.weights)
        self._generator.set_state(state.own["generator"])
        self._optimizer.restore(state.own)
        self.draft_version, self.policy_version = state.draft_version, state.policy_version
        self.schedule.newborn = state.newborn

    def _step(self, sample: Callable[[], Sequence[Document | Part]]) -> tuple[bool, LossStats, int] | None:
        """One optimizer step: (was it finite and taken, raw sums, tokens) over all ranks; None without positions."""
        embed, lm_head = self._policy()
        steps = self.schedule.unroll(self.draft_version)
        batch: PackedBatch | None = None
        sizes = torch.zeros(steps + 1, dtype=torch.float64, device=self.device)
        if documents := sample():
            share = self.settings.context_share if self.schedule.young(self.draft_version) else 0.0
            batch = pack([self._placed(document).with_context(share) for document in documents], self.device)
            sizes[:steps], sizes[steps] = batch.counts(steps), len(batch)
        summed = self._ranks.sum(sizes)
        if not float(summed[0]):
            return None
        sums = LossStats.zeros(steps, self.device).pack()
        self._optimizer.zero_grad()
        if batch is not None:
            loss, stats = self._loss(batch, embed, lm_head, summed[:steps])
            loss.backward()  # type: ignore[no-untyped-call]
            sums.copy_(stats.pack())
        flat = self._ranks.flat_gradients(list(self._trained.values()))
        stats = LossStats.unpack(self._ranks.sum(sums))
        if flat is not None:
            self._ranks.add_up(flat)
        finite = self._apply_gradients(flat, bool(torch.isfinite(stats.kl).all()))
        self._optimizer.zero_grad()
        return finite, stats, int(summed[steps])

    def _loss(self, batch: PackedBatch, embed: Tensor, lm_head: Tensor, counts: Tensor) -> tuple[Tensor, LossStats]:
        """What a step descends, and its raw sums; ``counts`` [J] are all ranks' positions of each unrolled step."""
        how = self.settings
        return ttt_loss(
            self.draft,
            batch,
            embed,
            lm_head,
            steps=counts.numel(),
            smoothing=how.chain_smoothing,
            counts=counts,
            cap=how.logit_cap,
        )

    def _apply_gradients(self, flat: Tensor | None, finite: bool) -> bool:
        """Clip, step; nothing happens, and False is returned, unless all is finite.

        Args:
            flat: all ranks' gradients together, see ``Ranks.flat_gradients``; None: this rank's count, which is alone.
            finite: is the loss.
        """
        parameters = list(self._trained.values())
        if flat is not None:
            for p, grad in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
                p.grad = grad.view_as(p)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.settings.grad_clip)
        if not finite or not bool(torch.isfinite(norm)):
            return False
        self._optimizer.step(self.schedule.rate(self.draft_version))
        self.draft_version += 1
        return True

    def _copied(self, source: Tensor, old: Tensor | None, on_host: bool = False) -> Tensor:
        """A detached copy on the trainer's device, or in the host's memory; into ``old`` where that fits."""
        dtype = self._dtype if self.device.type == "cpu" else source.dtype
        if old is not None and old.dtype == dtype:
            return old.copy_(source.detach())
        if on_host:
            return host_memory(source.detach().to(dtype)).copy_(source.detach())
        return source.detach().to(self.device, dtype, copy=True)

    def _policy(self) -> tuple[Tensor, Tensor]:
        if self._embed is None or self._lm_head is None:
            raise RuntimeError("the policy's embedding and LM head are not known yet: call update_policy first")
        return self._embed, self._lm_head

    def _would_overrun(self, began: float, seconds: float) -> bool:
        return time.perf_counter() - began + (self._step_seconds or 0.0) > seconds or seconds <= 0
