"""Megatron actors: layers spread over pipeline stages, sequences over tensor and context parallel ranks, all undone here.

The ranks that run one batch together (tensor x context x pipeline parallel) share its documents: each of them keeps every
``size``-th one, whole, and trains the draft on it. Inside the pipeline's schedule a stage undoes sequence and context
parallelism, with Megatron's and verl's own functions, and keeps what it owns of the documents in host memory; behind the
schedule, where collectives of the pipeline cannot meet its own, each stage hands that to the rank whose document it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn
from verl.models.mcore.util import (
    postprocess_bshd_engine,
    postprocess_thd_engine,
    preprocess_bshd_engine,
    preprocess_thd_engine,
)
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.megatron_utils import unwrap_model

from spec_plugin.adapter import LAST, Documents, Piece, Reason, RolloutHarvest, Rows, SpecRun, Taps, packed
from spec_plugin_verl import batches
from spec_plugin_verl.actor import SpecActor


class MegatronActor(SpecActor):
    """Mix-in for verl's ``MegatronEngineWithLMHead``: layers on several ranks, whose states are exchanged behind each pass."""

    module: list[nn.Module]  # one chunk of the model; more of them (virtual pipeline) are refused
    param_dtype: torch.dtype

    def spec_dtype(self) -> str:
        """Dtype of the parameters, in which the forward pass runs."""
        return str(self.param_dtype).removeprefix("torch.")

    def spec_harvest(self, run: SpecRun) -> PipelineHarvest:
        """Hooks on the layers of this rank's stage."""
        return PipelineHarvest(run, self)

    def spec_modules(self) -> Sequence[nn.Module]:
        """The model chunks of this pipeline stage; one, since virtual pipelines are refused."""
        return self.module

    def spec_log_probs(self, output: Mapping[str, Any], data: Any) -> Tensor | None:
        """The last stage's, told to all others (collective)."""
        found = super().spec_log_probs(output, data)
        if mpu.get_pipeline_model_parallel_world_size() == 1:
            return found
        group, source = mpu.get_pipeline_model_parallel_group(), mpu.get_pipeline_model_parallel_last_rank()
        dtype = [None if found is None else found.dtype]
        dist.broadcast_object_list(dtype, src=source, group=group)
        if dtype[0] is None:
            return None
        lengths = [len(row) for row in data["input_ids"].unbind()]
        values = torch.empty(sum(lengths), dtype=dtype[0], device=get_device_id())
        if found is not None:
            values.copy_(torch.cat(list(found.unbind())))
        dist.broadcast(values, src=source, group=group)
        return torch.nested.as_nested_tensor(list(torch.split(values.cpu(), lengths)), layout=torch.jagged)

    def spec_reported(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """verl asks the first rank of the last stage; the first rank of all lies in the same pipeline (collective)."""
        if mpu.get_pipeline_model_parallel_world_size() > 1:
            told = [dict(metrics)]
            source = mpu.get_pipeline_model_parallel_first_rank()
            dist.broadcast_object_list(told, src=source, group=mpu.get_pipeline_model_parallel_group())
            metrics = told[0]
        return metrics if self.is_mp_src_rank_with_outputs() else {}  # type: ignore[attr-defined]

    def forward_step(self, batch_iter: Iterator[Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """One micro-batch of this stage; captured while the pass still has harvest budget."""
        if self._run is None or not self._run.harvest.plan.active:  # a training pass, most of all
            return super().forward_step(batch_iter, model, *args, **kwargs)  # type: ignore[misc]
        batch = next(batch_iter)
        with self._run.micro_batch(lambda: batches.documents(batch), lambda state: rows(self, model, state, batch)):
            return super().forward_step(iter((batch,)), model, *args, **kwargs)  # type: ignore[misc]


@dataclass
class _Documents:
    """Pieces of one pass that this rank holds for itself and for other stages, in the order of the batch."""

    parts: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)  # token ids, mask, tokens before it
    stages: list[int] = field(default_factory=list)  # whose document it is
    states: dict[int, list[Tensor]] = field(default_factory=dict)  # by layer, of this stage: [n, H] in host memory


class PipelineHarvest(RolloutHarvest):
    """Harvest of one Megatron rank: it keeps its stage's part of each pass, and ``deliver`` brings the parts together."""

    def __init__(self, run: SpecRun, engine: Any) -> None:
        """Bind to a session and an engine; nothing is captured before ``open``."""
        self._engine = engine
        tensor, context = mpu.get_tensor_model_parallel_world_size(), mpu.get_context_parallel_world_size()
        self._column = mpu.get_tensor_model_parallel_rank() + tensor * mpu.get_context_parallel_rank()
        self._columns: int = tensor * context
        self._stage: int = mpu.get_pipeline_model_parallel_rank()
        self._stages: int = mpu.get_pipeline_model_parallel_world_size()
        self._documents = _Documents()
        self._seconds = 0.0  # of this pass
        super().__init__(run, self._columns * self._stages, mpu.get_tensor_and_context_parallel_group())

    def taps(self, layers: Sequence[int]) -> Taps:
        """On the layers of this stage; its chunk is a ``GPTModel``, or a multimodal one around it."""
        (chunk,) = map(unwrap_model, self._engine.module)
        decoder, count = getattr(chunk, "language_model", chunk).decoder, chunk.config.num_layers
        norm = getattr(decoder, "final_layernorm", None)
        places = {layer.layer_number - 1: layer for layer in decoder.layers} | ({} if norm is None else {count: norm})
        return Taps({i: places[i] for i in layers if i in places}, norm)

    def open(self) -> None:
        """A new budget; what an earlier pass has left undelivered is dropped (collective)."""
        self._documents, self._seconds = _Documents(), 0.0
        super().open()

    def keep(self, taps: Taps, documents: Documents, pieces: Sequence[Piece], rows: Rows | None) -> None:
        """Keep what this stage owns of each piece that a rank of this column keeps (collective within the stage)."""
        assert rows is not None
        with self._timed():
            mine = [piece for piece in pieces if piece.rank % self._columns == self._column]
            kept = self._documents
            for piece in mine:
                ids, mask = (whole[piece.index][piece.start : piece.stop].cpu() for whole in documents)
                kept.parts.append((ids, mask.bool(), piece.start))
                kept.stages.append(piece.rank // self._columns)
            for layer, state in sorted(taps.states().items()):
                parts = rows(state)
                kept.states.setdefault(layer, []).extend(parts[p.index][p.start : p.stop].cpu() for p in mine)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began

    def deliver(self) -> None:
        """Behind the pass: hand every document to the rank whose it is, and that to the session (collective)."""
        session, kept, self._documents = self.session, self._documents, _Documents()
        if self._wanted is None:
            return
        with session.guarded(Reason.HARVEST):
            with self._timed():
                states = kept.states if self._stages == 1 else self._exchanged(kept)
            _check_complete((*self._wanted, LAST), states, len(kept.parts))
            if own := [i for i, stage in enumerate(kept.stages) if stage == self._stage]:
                parts = [kept.parts[i] for i in own]
                by_layer = [torch.cat([states[layer][i] for i in own]) for layer in (*self._wanted, LAST)]
                began = time.perf_counter() - self._seconds
                if (hidden := packed(parts, by_layer, self._run.policy_version, began)) is not None:
                    session.target_forward(hidden)

    def _exchanged(self, kept: _Documents) -> dict[int, list[Tensor]]:
        """States of all layers that a stage has; of documents that are another stage's, nothing (collective)."""
        group = mpu.get_pipeline_model_parallel_group()
        about: list[Any] = [None] * self._stages
        shown = {
            layer: (len(found), found[0].shape[-1], found[0].dtype) for layer, found in kept.states.items() if found
        }
        dist.all_gather_object(about, (shown, len(kept.parts)), group=group)
        sources = {layer: stage for stage, (theirs, _) in enumerate(about) for layer in theirs}
        counts = {layer: theirs[layer][0] for theirs, _ in about for layer in theirs}
        if {count for _, count in about} != {len(kept.parts)} or any(n != len(kept.parts) for n in counts.values()):
            raise RuntimeError(
                f"pipeline stages captured different documents (by stage: layer -> documents, width, dtype; documents): {about}"
            )
        lengths = [len(ids) for ids, _, _ in kept.parts]
        out: dict[int, list[Tensor]] = {}
        for layer in sorted(sources):
            stage = sources[layer]
            _, width, dtype = about[stage][0][layer]
            out[layer] = self._handed_out(kept, layer, stage, lengths, width, dtype)
        return out

    def _handed_out(
        self, kept: _Documents, layer: int, source: int, lengths: Sequence[int], width: int, dtype: torch.dtype
    ) -> list[Tensor]:
        """States of one layer, which ``source`` owns, of this stage's documents; of others an empty tensor."""
        group = mpu.get_pipeline_model_parallel_group()
        out = [torch.empty(0, width, dtype=dtype) for _ in lengths]
        for stage in range(self._stages):
            own = [i for i, s in enumerate(kept.stages) if s == stage]
            if not own:
                continue
            sizes = [lengths[i] for i in own]
            rows = torch.empty(sum(sizes), width, dtype=dtype, device=get_device_id())
            if source == self._stage:
                rows.copy_(torch.cat([kept.states[layer][i] for i in own]))
            if source != stage:
                dist.broadcast(rows, src=dist.get_global_rank(group, source), group=group)
            if stage == self._stage:
                for i, part in zip(own, torch.split(rows.cpu(), sizes), strict=True):
                    out[i] = part
        return out


def _check_complete(wanted: Sequence[int], found: Mapping[int, Any], documents: int) -> None:
    if documents and (missing := sorted(set(wanted) - found.keys())):
        raise RuntimeError(f"no stage of the pipeline owns the layers {missing} ({LAST}: the final norm)")


def rows(engine: Any, chunk: Any, state: Tensor, batch: Any) -> Sequence[Tensor]:
    """Each document's rows, [n, H], of what this rank has of a micro-batch (collective).

    Args:
        engine: verl's.
        chunk: of the model, that ran it.
        state: what a layer was given or gave, [S / tensor, B, H] or packed [T / (tensor context), 1, H].
        batch: the micro-batch, whose ``input_ids`` may lie elsewhere.
    """
    ids = batch["input_ids"].to(state.device)  # masks are made where they are, and gathered
    if engine.tf_config.sequence_parallel:
        state = gather_from_sequence_parallel_region(state, tensor_parallel_output_grad=False)
    state, narrow = state.transpose(0, 1).contiguous(), engine.tf_config.fp8 in ("e4m3", "hybrid")
    if engine.engine_config.use_remove_padding:
        bucket = engine.engine_config.pad_to_length_bucket if engine.engine_config.pad_to_length else None
        layout = engine._get_context_parallel_layout(unwrap_model(chunk))
        _, packed, _ = preprocess_thd_engine(
            ids, pre_process=False, use_fp8_padding=narrow, pad_to_length_bucket=bucket, cp_layout=layout
        )
        return list(postprocess_thd_engine(state, packed, ids, ids.shape[0], cp_layout=layout).unbind())
    longest = tu.get_non_tensor_data(data=batch, key="forced_max_seqlen", default=None)
    _, mask, _ = preprocess_bshd_engine(ids, pre_process=False, use_fp8_padding=narrow, forced_max_seqlen=longest)
    return list(postprocess_bshd_engine(state, mask).unbind())
