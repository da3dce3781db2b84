"""DraftTrainer: trains one draft online in bounded slices of time, beside a trainer whose state it never touches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from draft_training import state
from draft_training.batch import Document, PackedBatch, pack
from draft_training.buffer import HiddenBuffer
from draft_training.card import Rest, fast_products
from draft_training.draft import DraftShape
from draft_training.errors import DraftConfigError, OtherRankFailed
from draft_training.loss import LossStats, ttt_loss
from draft_training.optimizer import DraftOptimizer
from draft_training.unroll import Unroll

POLICY_TENSORS_MISSING = "the policy's embedding and LM head are not known yet: call update_policy first"


@dataclass(frozen=True)
class TrainSettings:
    """How the draft is trained."""

    lr: float = 0.1  # highest of matrices: size of an update's singular values, see Muon
    vector_lr: float = 1e-3  # of norms and a trained head (AdamW)
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's
    weight_decay: float = 0.5  # of matrices, as a share of lr: what a policy that moves asks for
    grad_clip: float = 1.0  # norm of the draft's own gradients
    ttt_steps: int = 3  # most unrolled steps of the training-time test; the engine's k
    first_steps: int = 3  # unrolled by a newborn draft, until it reaches further
    ttt_decay: float = 1.0  # weight of step j in the loss is ttt_decay ** j
    logit_cap: float | None = None  # of the target's logits, see ``outside.logit_cap``
    tokens_per_step: int = 1024  # per optimizer step and rank, while no more than first_steps are unrolled
    replay_share: float = 0.25  # share of older policy versions in a step
    warmup_steps: int = 10  # linear
    decay_steps: float = 30.0  # steps from which a newborn draft's rates fall as 1 / sqrt
    lr_floor: float = 0.15  # share of the rates that is kept for ever: online training has no end to decay towards
    offload: bool = False  # optimizer state and the policy's copies lie in the host's memory between slices
    train_head: bool = False  # pruned vocabulary only: train the head instead of following the policy's rows


@dataclass(frozen=True)
class SliceReport:
    """What a slice of training, or an evaluation, did and measured; with data parallelism the same on all ranks."""

    steps: int  # optimizer steps taken
    tokens: int  # tokens that went through the draft, all ranks
    loss: float  # mean KL summed over steps with their decay, nats; 0.0 when nothing was measured
    acceptance_length: float  # see LossStats.acceptance_length; 1.0 when nothing was measured
    agreement: tuple[float, ...]  # [J] share of positions where the draft's greedy token is the target's argmax
    acceptance: tuple[float, ...]  # [J] mean target probability of the draft's greedy token
    chances: tuple[float, ...]  # [J] chance that each drafted token is accepted, given those before it; () when unknown
    rounds: int  # replayed decoding rounds behind acceptance_length and chances
    skipped: int  # steps given up because loss or gradients were not finite
    seconds: float


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
            DraftConfigError: if ``tensors`` do not match, or a full-vocabulary head is to be trained.
        """
        if settings.train_head and not config.pruned:
            raise DraftConfigError(
                "train_head=True needs a pruned vocabulary: with the full one the head is the policy's; set draft_vocab_size"
            )
        self.config, self.settings, self.device = config, settings, torch.device(device)
        self.draft_version = 0  # optimizer steps taken
        self.policy_version = -1  # of the last update_policy
        self.skipped = 0  # steps given up so far
        self.rate_scale = 1.0  # a further factor of the learning rates, for training that has an end
        self._group, self._dtype = process_group, dtype
        self._generator = torch.Generator(device="cpu").manual_seed(seed)
        self._embed: Tensor | None = None
        self._lm_head: Tensor | None = None
        self._head_base: Tensor | None = None  # [Vd, H] policy rows that a trained head started from
        self._step_seconds: float | None = None
        self._newborn = tensors is None
        self.unroll = Unroll(settings.first_steps, settings.ttt_steps, grown=not self._newborn)
        with self._own_modes():
            with self._one_for_all(torch.zeros(1, device=self.device)):
                self.draft = config.build(self.device, dtype)
                self.draft.reset_parameters(self._generator)
                if config.pruned:
                    self.draft.lm_head.weight.requires_grad_(settings.train_head)
                if tensors is not None:
                    self.install(tensors)
            self._broadcast()
            self._trained = {n: p for n, p in self.draft.named_parameters() if p.requires_grad}
            self._optimizer = DraftOptimizer(
                self._trained,
                lr=settings.lr,
                vector_lr=settings.vector_lr,
                betas=settings.betas,
                weight_decay=settings.weight_decay,
            )

        self._rest = Rest(self.device, self._only_for_slices) if settings.offload else None

    def _only_for_slices(self) -> Iterator[Tensor]:
        """What is needed in slices only: the optimizer's state and the policy's tensors."""
        yield from self._optimizer.state().values()
        yield from (t for t in (self._embed, self._lm_head) if t is not None)

    def begin_short(self) -> None:
        """Unroll, and learn at the rates, as a newborn draft does: what was given turned out to know nothing."""
        self._newborn = True
        self.unroll = Unroll(self.settings.first_steps, self.settings.ttt_steps)

    def install(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the draft's weights, converting their dtype; the optimizer's state is kept.

        Raises:
            DraftConfigError: if names or shapes do not match the config.
        """
        self.config.check(tensors)
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
        with self._own_modes(), torch.no_grad():
            tied = lm_head.data_ptr() == embed.data_ptr()
            self._embed = self._copied(embed, self._embed)
            old = self._lm_head if self._lm_head is not self._embed else None
            self._lm_head = self._embed if tied else self._copied(lm_head, old)
            self.policy_version = policy_version
            if self.config.pruned:
                self._follow_policy()

    def select_vocabulary(self, token_counts: Tensor) -> None:
        """Choose the pruned vocabulary: the most frequent tokens, ties to the lower id (collective).

        The layer's weights do not depend on it, so it may be called at any time; a trained head starts again.

        Args:
            token_counts: [V] how often each token occurred; added over the ranks.

        Raises:
            DraftConfigError: if the draft has the full vocabulary, or the shape is not [V].
        """
        if not self.config.pruned or tuple(token_counts.shape) != (self.config.vocab_size,):
            raise DraftConfigError(
                f"select_vocabulary needs a pruned draft and counts of shape [{self.config.vocab_size}], got "
                f"{list(token_counts.shape)} for draft_vocab_size={self.config.draft_vocab_size}"
            )
        with self._own_modes(), torch.no_grad():
            counts = self._sum(token_counts.to(self.device, torch.float64, copy=True))
            order = counts.argsort(descending=True, stable=True)
            self.draft.set_vocabulary(order[: self.config.draft_vocab_size])
            self._head_base = None
            self._optimizer.forget(self.draft.lm_head.weight)
            if self._lm_head is not None:
                self._follow_policy()

    def train_slice(self, buffer: HiddenBuffer, seconds: float, max_steps: int) -> SliceReport:
        """Train for at most ``seconds`` and ``max_steps`` optimizer steps (collective).

        A step that by the measured cost of earlier ones would overrun is not begun; the very first one is, since its
        cost is unknown. When not even one step fits, the estimate is halved, so that one slow step does not end training
        for good. Ranks stop together; one whose buffer is empty takes part with zero positions.

        Raises:
            RuntimeError: before the first ``update_policy``.
        """
        began, steps, skipped, tokens = time.perf_counter(), 0, 0, 0
        total = LossStats.zeros(self.unroll.steps, self.device)
        with self._own_modes(), self._on_device():
            while steps + skipped < max_steps and not self._any(self._would_overrun(began, seconds)):
                step_began = time.perf_counter()
                outcome = self._step(lambda: buffer.sample(self._tokens, self.settings.replay_share))
                if outcome is None:
                    break
                finite, stats, step_tokens = outcome
                steps, skipped, tokens = steps + finite, skipped + (not finite), tokens + step_tokens
                if finite:
                    # what was measured with another unroll is no mean with this one
                    total = stats if stats.count.shape != total.count.shape else total + stats
                    self.unroll.observe(stats)
                self._measured(time.perf_counter() - step_began)
            if not steps + skipped and self._step_seconds is not None and seconds > 0:
                self._step_seconds /= 2
        self.skipped += skipped
        return self._report(total, steps, tokens, skipped, time.perf_counter() - began)

    def evaluate(self, documents: Sequence[Document], steps: int | None = None) -> SliceReport:
        """Measure the draft on whole documents without training it (collective).

        Args:
            documents: this rank's; may be empty.
            steps: drafted tokens to unroll, the engine's k; None: ``settings.ttt_steps``.

        Raises:
            RuntimeError: before the first ``update_policy``.
        """
        began, unrolled = time.perf_counter(), steps or self.settings.ttt_steps
        total = LossStats.zeros(unrolled, self.device)
        with self._own_modes(), self._on_device(), torch.no_grad():
            embed, lm_head = self._policy()
            for part in _portions(documents, self.settings.tokens_per_step):
                batch = pack(part, self.device)
                cap = self.settings.logit_cap
                total = total + ttt_loss(self.draft, batch, embed, lm_head, steps=unrolled, cap=cap)[1]
            tokens = torch.tensor([sum(map(len, documents))], dtype=torch.float64, device=self.device)
            summed = self._sum(torch.cat([total.pack(), tokens]))
        return self._report(LossStats.unpack(summed[:-1]), 0, int(summed[-1]), 0, time.perf_counter() - began)

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
            The digest of the draft's tensors in the trainer's dtype.
        """
        return state.save(self, path, extra or {})

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
        if self._group is None:
            return state.restore(self, state.read(self, path))
        saved: state.Saved | None = None
        with self._one_for_all(torch.zeros(1, device=self.device)):
            if dist.get_rank(self._group) == 0:
                saved = state.read(self, path)
        return self._take(saved)

    def follow_first(self) -> None:
        """Go on with the first rank's draft, optimizer, versions and random stream: ranks may have parted (collective)."""
        if self._group is not None:
            self._take(state.held(self) if dist.get_rank(self._group) == 0 else None)

    def _take(self, saved: state.Saved | None) -> dict[str, Any]:
        """The first rank's, on every rank; it alone has some (collective)."""
        assert self._group is not None
        about: list[Any] = [saved and saved.about]
        dist.broadcast_object_list(about, src=dist.get_global_rank(self._group, 0), group=self._group)
        weights, own = (self._from_first(part) for part in ((saved.weights, saved.own) if saved else (None, None)))
        return state.restore(self, state.Saved(about[0], weights, own))

    def _from_first(self, tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """The first rank's tensors, on the host of every rank; it alone has some (collective)."""
        assert self._group is not None
        source = dist.get_global_rank(self._group, 0)
        kinds: list[Any] = [tensors and [(name, t.shape, t.dtype) for name, t in tensors.items()]]
        dist.broadcast_object_list(kinds, src=source, group=self._group)
        out = {}
        for name, shape, dtype in kinds[0]:
            if tensors is None:
                moved = torch.empty(shape, dtype=dtype, device=self.device)
            else:
                moved = tensors[name].to(self.device, copy=True)
            dist.broadcast(moved, src=source, group=self._group)
            out[name] = moved.cpu()
        return out

    def _step(self, sample: Callable[[], Sequence[Document]]) -> tuple[bool, LossStats, int] | None:
        """One optimizer step: (was it finite and taken, raw sums, tokens) over all ranks; None without positions.

        What fails on one rank alone, memory above all, is raised on all of them at the next sum: nobody waits for it.
        """
        embed, lm_head = self._policy()
        steps = self.unroll.steps
        batch: PackedBatch | None = None
        sizes = torch.zeros(steps + 1, dtype=torch.float64, device=self.device)
        with self._one_for_all(sizes) as summed:
            if documents := sample():
                batch = pack(documents, self.device)
                sizes[:steps], sizes[steps] = batch.counts(steps), len(batch)
        if not float(summed[0]):
            return None
        sums = LossStats.zeros(steps, self.device).pack()
        self._optimizer.zero_grad()
        with self._one_for_all(sums) as found:
            if batch is not None:
                how = self.settings
                loss, stats = ttt_loss(
                    self.draft,
                    batch,
                    embed,
                    lm_head,
                    steps=steps,
                    decay=how.ttt_decay,
                    counts=summed[:steps],
                    cap=how.logit_cap,
                )
                loss.backward()  # type: ignore[no-untyped-call]
                sums.copy_(stats.pack())
        stats = LossStats.unpack(found)
        finite = self._apply_gradients(bool(torch.isfinite(stats.kl).all()))
        self._optimizer.zero_grad()
        return finite, stats, int(summed[steps])

    @contextmanager
    def _one_for_all(self, mine: Tensor) -> Iterator[Tensor]:
        """Run the block, then add its ``mine`` up over all ranks, into what this yields; all raise if one of them does."""
        total = torch.zeros_like(mine)
        error: Exception | None = None
        try:
            yield total
        except Exception as failure:
            error = failure
        summed = self._sum(torch.cat([mine, mine.new_tensor([float(error is not None)])]))
        if error is not None:
            raise error
        if float(summed[-1]):
            raise OtherRankFailed("train the draft")
        total.copy_(summed[:-1])

    def _apply_gradients(self, finite: bool) -> bool:
        """Sum gradients over the ranks, clip, step; nothing happens, and False is returned, unless all is finite."""
        parameters = list(self._trained.values())
        if self._group is not None:
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])
            parts = torch.split(self._sum(flat), [p.numel() for p in parameters])
            for p, grad in zip(parameters, parts, strict=True):
                p.grad = grad.view_as(p)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.settings.grad_clip)
        if not finite or not bool(torch.isfinite(norm)):
            return False
        self._optimizer.step(self._rate(self.draft_version) * self.rate_scale)
        self.draft_version += 1
        return True

    @property
    def _tokens(self) -> int:
        """Tokens of an optimizer step: its positions, unrolled, stay as many, and so its memory and its time."""
        settings = self.settings
        return settings.tokens_per_step * min(settings.first_steps, self.unroll.steps) // self.unroll.steps

    def _rate(self, step: int) -> float:
        """Factor of the full learning rates at an optimizer step.

        After a linear warm-up a newborn draft's falls as one over the root of the steps; a draft that was trained before
        has nothing to gain from large steps, and much to lose. The policy never stops moving, so the factor stays at its floor.
        """
        settings = self.settings
        warm = min(1.0, (step + 1) / max(1, settings.warmup_steps))
        young = (1 + step / settings.decay_steps) ** -0.5 if self._newborn else 0.0
        return warm * max(settings.lr_floor, young)

    def _follow_policy(self) -> None:
        """Give a pruned head the policy's rows; a trained one keeps what it learned on top of its old rows."""
        assert self._lm_head is not None
        if not self.settings.train_head:
            self.draft.refresh_head(self._lm_head)
            return
        weight = self.draft.lm_head.weight
        rows = self._lm_head[self.draft.vocabulary().to(self._lm_head.device)].to(weight)
        weight.copy_(rows if self._head_base is None else weight + (rows - self._head_base))
        self._head_base = rows

    def _copied(self, source: Tensor, old: Tensor | None) -> Tensor:
        """A detached copy on the trainer's device, into ``old`` where that fits."""
        dtype = self._dtype if self.device.type == "cpu" else source.dtype
        if old is not None and old.dtype == dtype:
            return old.copy_(source.detach())
        return source.detach().to(self.device, dtype, copy=True)

    def _policy(self) -> tuple[Tensor, Tensor]:
        if self._embed is None or self._lm_head is None:
            raise RuntimeError(POLICY_TENSORS_MISSING)
        return self._embed, self._lm_head

    def _would_overrun(self, began: float, seconds: float) -> bool:
        return time.perf_counter() - began + (self._step_seconds or 0.0) > seconds or seconds <= 0

    def _measured(self, seconds: float) -> None:
        old = self._step_seconds
        self._step_seconds = seconds if old is None else (old + seconds) / 2

    def _any(self, flag: bool) -> bool:
        """True on all ranks if it is true on one."""
        if self._group is None:
            return flag
        return bool(self._sum(torch.tensor([float(flag)], device=self.device)).item())

    def _sum(self, tensor: Tensor) -> Tensor:
        """Add over the ranks, in place."""
        if self._group is not None:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self._group)
        return tensor

    def _broadcast(self) -> None:
        if self._group is not None:
            source = dist.get_global_rank(self._group, 0)
            for tensor in self.draft.state_dict().values():
                dist.broadcast(tensor, src=source, group=self._group)

    @contextmanager
    def _own_modes(self) -> Iterator[None]:
        """Gradients on, inference mode and autocast off, whatever the caller is in; all restored afterwards."""
        autocast = torch.autocast(self.device.type, enabled=False)
        with torch.inference_mode(False), torch.enable_grad(), autocast, fast_products(self.device):
            yield

    def _on_device(self) -> AbstractContextManager[None]:
        """Everything that a slice works with, where it works."""
        return nullcontext() if self._rest is None else self._rest.awake()

    def _report(self, stats: LossStats, steps: int, tokens: int, skipped: int, seconds: float) -> SliceReport:
        return SliceReport(
            steps=steps,
            tokens=tokens,
            loss=stats.loss(self.settings.ttt_decay),
            acceptance_length=stats.acceptance_length,
            agreement=stats.mean(stats.agreement),
            acceptance=stats.mean(stats.probability),
            chances=stats.chances,
            rounds=int(stats.rounds),
            skipped=skipped,
            seconds=seconds,
        )


def _portions(documents: Sequence[Document], tokens: int) -> Iterator[list[Document]]:
    """Documents in order, in lists of at most ``tokens`` tokens, or of one longer document."""
    part: list[Document] = []
    for document in documents:
        if part and sum(map(len, part)) + len(document) > tokens:
            yield part
            part = []
        part.append(document)
    if part:
        yield part
