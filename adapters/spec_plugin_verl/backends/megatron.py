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

from spec_plugin.adapter import HiddenStates, RolloutControl, chosen, together
from spec_plugin_verl import batches
from spec_plugin_verl.actor import SpecActor

#: among the states of a pass, beside the indices of auxiliary layers: the output of the final norm
_LAST = -1


class Actor(SpecActor):
    """For verl's ``MegatronEngineWithLMHead``."""

    module: list[nn.Module]  # one chunk of the model; more of them (virtual pipeline) are refused
    param_dtype: torch.dtype

    def spec_dtype(self) -> str:
        """Of the parameters, which is the forward pass's."""
        return str(self.param_dtype).removeprefix("torch.")

    def spec_harvest(self, control: RolloutControl) -> PipelineHarvest:
        """Hooks on the layers of this rank's stage."""
        return PipelineHarvest(control, self)

    def spec_modules(self) -> Sequence[nn.Module]:
        """The chunks of this stage."""
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
        harvest = None if self._run is None else self._run.harvest
        if not isinstance(harvest, PipelineHarvest) or not harvest.wants:
            return super().forward_step(batch_iter, model, *args, **kwargs)  # type: ignore[misc]
        batch = next(batch_iter)
        with harvest.capture(model, batch):
            return super().forward_step(iter((batch,)), model, *args, **kwargs)  # type: ignore[misc]


@dataclass
class _Documents:
    """Of one pass, what this rank holds for itself and for other stages, in the order of the batch."""

    ids: list[Tensor] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)
    stages: list[int] = field(default_factory=list)  # whose document it is
    states: dict[int, list[Tensor]] = field(default_factory=dict)  # by layer, of this stage: [n, H] in host memory


class PipelineHarvest:
    """The harvest of one rank of a Megatron actor; see :class:`spec_plugin.adapter.Harvest`."""

    def __init__(self, control: RolloutControl, engine: Any) -> None:
        """Bind to a session and an engine; nothing is captured before ``open``."""
        self._control, self._engine = control, engine
        session = control.session
        harvested = session.method.harvest if session.config.train else None
        self._wanted = None if harvested is None else (*harvested, _LAST)
        tensor, context = mpu.get_tensor_model_parallel_world_size(), mpu.get_context_parallel_world_size()
        self._column = mpu.get_tensor_model_parallel_rank() + tensor * mpu.get_context_parallel_rank()
        self._columns: int = tensor * context
        self._stage: int = mpu.get_pipeline_model_parallel_rank()
        self._stages: int = mpu.get_pipeline_model_parallel_world_size()
        self._left = self._turn = 0
        self._documents = _Documents()
        self._seconds = 0.0  # of this pass

    @property
    def _ranks(self) -> int:
        return self._columns * self._stages

    @property
    def wants(self) -> bool:
        """Is the next micro-batch to be captured; the same on all ranks that run it together."""
        return self._left > 0

    def open(self) -> None:
        """Allow ``harvest_tokens`` tokens for each rank from here on (collective)."""
        self._control.agree()
        session = self._control.session
        self._documents, self._turn, self._seconds = _Documents(), 0, 0.0
        wanted = self._wanted is not None and not session.failed
        self._left = self._ranks * session.config.harvest_tokens if wanted else 0

    def close(self) -> None:
        """Capture nothing until the next ``open``."""
        self._left = 0

    @contextmanager
    def capture(self, model: nn.Module, batch: Any) -> Iterator[None]:
        """Hook this stage for one micro-batch, and keep what it owns of the documents (collective within the stage)."""
        assert self._wanted is not None
        session, taps = self._control.session, Taps()
        with session.guarded("harvest"):
            taps = Taps.on(unwrap_model(model), self._wanted)
        try:
            yield
        finally:
            taps.remove()
        with self._timed(), session.guarded("harvest"):
            self._keep(taps, batch, self._engine._get_context_parallel_layout(unwrap_model(model)))

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began

    def _keep(self, taps: Taps, batch: Any, layout: str) -> None:
        # the ranks of a stage gather their parts of the states behind this: all of them, or none
        with together("harvest the pass", mpu.get_tensor_and_context_parallel_group()):
            states = taps.states()
            ids, masks = batches.documents(batch)
        lengths = [len(document) for document in ids]
        budget = self._ranks * self._control.session.config.harvest_tokens
        picked, cut = chosen(lengths, self._left, cut_long=self._left == budget)
        self._left -= sum(min(lengths[i], cut) for i in picked)
        owners = [(self._turn + n) % self._ranks for n in range(len(picked))]
        self._turn += len(picked)
        mine = [
            (i, o // self._columns) for i, o in zip(picked, owners, strict=True) if o % self._columns == self._column
        ]
        kept = self._documents
        kept.ids += [ids[i][-cut:].cpu() for i, _ in mine]
        kept.masks += [masks[i][-cut:].bool().cpu() for i, _ in mine]
        kept.stages += [stage for _, stage in mine]
        for layer, state in states:
            whole = self._whole(state, batch, layout)
            kept.states.setdefault(layer, []).extend(whole[i][-cut:].cpu() for i, _ in mine)

    def _whole(self, state: Tensor, batch: Any, layout: str) -> Sequence[Tensor]:
        """Each document's rows, [n, H], from a part of the batch, [S / tensor, B, H] or packed [T / (tensor context), 1, H]."""
        engine, ids = self._engine, batch["input_ids"].to(state.device)  # masks are made where they are, and gathered
        if engine.tf_config.sequence_parallel:
            state = gather_from_sequence_parallel_region(state, tensor_parallel_output_grad=False)
        state, narrow = state.transpose(0, 1).contiguous(), engine.tf_config.fp8 in ("e4m3", "hybrid")
        if engine.engine_config.use_remove_padding:
            bucket = engine.engine_config.pad_to_length_bucket if engine.engine_config.pad_to_length else None
            _, packed, _ = preprocess_thd_engine(
                ids, pre_process=False, use_fp8_padding=narrow, pad_to_length_bucket=bucket, cp_layout=layout
            )
            return list(postprocess_thd_engine(state, packed, ids, ids.shape[0], cp_layout=layout).unbind())
        longest = tu.get_non_tensor_data(data=batch, key="forced_max_seqlen", default=None)
        _, mask, _ = preprocess_bshd_engine(ids, pre_process=False, use_fp8_padding=narrow, forced_max_seqlen=longest)
        return list(postprocess_bshd_engine(state, mask).unbind())

    def deliver(self) -> None:
        """Behind the pass: hand every document to the rank whose it is, and that to the session (collective)."""
        session, kept, self._documents = self._control.session, self._documents, _Documents()
        if self._wanted is None:
            return
        with session.guarded("harvest"):
            with self._timed():
                states = kept.states if self._stages == 1 else self._exchanged(kept)
            _check_complete(self._wanted, states, len(kept.ids))
            if own := [i for i, stage in enumerate(kept.stages) if stage == self._stage]:
                session.target_forward(self._event(kept, own, states))

    def _exchanged(self, kept: _Documents) -> dict[int, list[Tensor]]:
        """States of all layers that a stage has; of documents that are another stage's, nothing (collective)."""
        group = mpu.get_pipeline_model_parallel_group()
        about: list[Any] = [None] * self._stages
        shown = {
            layer: (len(found), found[0].shape[-1], found[0].dtype) for layer, found in kept.states.items() if found
        }
        dist.all_gather_object(about, (shown, len(kept.ids)), group=group)
        sources = {layer: stage for stage, (theirs, _) in enumerate(about) for layer in theirs}
        counts = {layer: theirs[layer][0] for theirs, _ in about for layer in theirs}
        if {count for _, count in about} != {len(kept.ids)} or any(n != len(kept.ids) for n in counts.values()):
            raise RuntimeError(f"the pipeline's stages have captured different documents: {about}")
        lengths = [len(document) for document in kept.ids]
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

    def _event(self, kept: _Documents, own: Sequence[int], states: Mapping[int, Sequence[Tensor]]) -> HiddenStates:
        last = torch.cat([states[_LAST][i] for i in own])
        aux = [torch.cat([states[layer][i] for i in own]) for layer in self._wanted or () if layer != _LAST]
        return HiddenStates(
            input_ids=torch.cat([kept.ids[i] for i in own]),
            aux=torch.cat([last[:, :0], *aux], dim=-1),
            last=last,
            loss_mask=torch.cat([kept.masks[i] for i in own]),
            lengths=tuple(len(kept.ids[i]) for i in own),
            policy_version=self._control.policy_version,
            milliseconds=self._seconds * 1e3,
        )


def _check_complete(wanted: Sequence[int], found: Mapping[int, Any], documents: int) -> None:
    if documents and (missing := sorted(set(wanted) - found.keys())):
        raise RuntimeError(f"no stage of the pipeline owns the layers {missing} ({_LAST}: the final norm)")


class Taps:
    """Hooks on those of the wanted layers that a stage owns; what they saw of the last forward pass."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._seen: dict[int, Tensor] = {}
        self._trouble: Exception | None = None

    @classmethod
    def on(cls, chunk: Any, wanted: Sequence[int]) -> Taps:
        """Hook a chunk of the model, without its wrappers.

        Args:
            chunk: a ``GPTModel``, or a multimodal one around it.
            wanted: indices of layers whose inputs are wanted; their number: what enters the final norm; ``_LAST``: its output.
        """
        taps, decoder = cls(), getattr(chunk, "language_model", chunk).decoder
        norm, layers = getattr(decoder, "final_layernorm", None), chunk.config.num_layers
        for layer in decoder.layers:
            if (index := layer.layer_number - 1) in wanted:
                taps._handles.append(layer.register_forward_pre_hook(taps._input(index), with_kwargs=True))
        if norm is not None:
            if layers in wanted:
                taps._handles.append(norm.register_forward_pre_hook(taps._input(layers), with_kwargs=True))
            taps._handles.append(norm.register_forward_hook(taps._output))
        return taps

    def _input(self, index: int) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            try:
                self._seen[index] = (args[0] if args else kwargs["hidden_states"]).detach()
            except Exception as error:  # law 6; ``states`` raises it
                self._trouble = error

        return hook

    def _output(self, _module: nn.Module, _args: Any, output: Any) -> None:
        try:
            self._seen[_LAST] = output.detach()
        except Exception as error:  # law 6
            self._trouble = error

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def states(self) -> list[tuple[int, Tensor]]:
        """By layer, in the same order on all ranks of the stage.

        Raises:
            RuntimeError: if a layer was not called as expected.
        """
        if self._trouble is not None:
            raise RuntimeError(f"the decoder's layers were not called as expected: {self._trouble}") from self._trouble
        return sorted(self._seen.items())
