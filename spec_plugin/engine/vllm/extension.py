"""The worker extension: lets a trainer look at, replace and check the draft inside a running vLLM worker.

Use it alone, ``worker_extension_cls="spec_plugin.engine.vllm.extension.SpecWorkerExtension"``, or as a base class beside a
trainer's own extension, in either order. Every method starts with ``spec_``, because vLLM refuses an extension whose
names collide with the worker's, and takes and returns plain values, so that ``collective_rpc`` can carry them.

A refresh is ``spec_install_file``, between two engine steps, so no request is aborted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from draft_training import digest as weights_digest
from draft_training import fingerprint, row_digests
from spec_plugin.api.rollouts import Rollout
from spec_plugin.engine.lossless import check_running_config
from spec_plugin.engine.refresh import swap as refresh
from spec_plugin.engine.refresh.layout import Layout, draft_layout
from spec_plugin.engine.refresh.swap import HOST
from spec_plugin.engine.vllm.additional import own_settings, prepare_proposer
from spec_plugin.engine.vllm.capabilities import find_draft
from spec_plugin.engine.vllm.repairs import patches
from spec_plugin.engine.vllm.repairs.adapters import ADAPTER_PATCHES
from spec_plugin.engine.vllm.repairs.draft_noise import NOISE_PATCHES
from spec_plugin.engine.vllm.repairs.draft_passes import PASS_PATCHES
from spec_plugin.engine.vllm.repairs.draft_temperature import (
    TEMPERATURE_PATCHES,
    refuse_untempered,
    set_draft_temperature,
)
from spec_plugin.engine.vllm.repairs.graphs import GRAPH_PATCHES
from spec_plugin.engine.vllm.repairs.hidden_states import complete_target
from spec_plugin.engine.vllm.repairs.on_cpu import apply_cpu_patches, repack
from spec_plugin.engine.vllm.schedule.pause import pause_draft


@dataclass(frozen=True)
class _Served:
    """A draft that this worker serves, or did."""

    version: int = refresh.NO_VERSION
    digest: str = ""
    fingerprint: str | None = None  # of the weights as they were installed, or first seen
    draft_temperature: float = 1.0  # at which its proposals are drawn, where the engine samples them


@dataclass
class _State:
    """The draft that this worker serves, and the one before."""

    served: _Served = field(default_factory=_Served)
    previous: tuple[_Served, dict[str, Tensor]] | None = None  # held until ``spec_settle``
    #: the draft's buffers as they were loaded, on the host, each with its fingerprint
    constants: dict[str, tuple[Tensor, str]] = field(default_factory=dict)


class SpecWorkerExtension:
    """Methods that vLLM adds to its worker.

    ``additional_config={"spec_plugin": {"skip_patches": ["expand_kernel"]}}`` in the engine's options leaves a repair
    out; the test that tells when upstream has made it unnecessary needs that.
    """

    model_runner: Any
    vllm_config: Any
    _spec_state: _State

    def __new__(cls, *args: Any, **kwargs: Any) -> SpecWorkerExtension:
        """Refuse a lossy engine and repair this vLLM, before the worker loads a model; then make the worker.

        Raises:
            SpecConfigError: if the engine's speculation settings are not on the lossless allow-list, whoever made them.
            PatchError: if a repair no longer fits this vLLM.
        """
        vllm_config = kwargs.get("vllm_config") or _current_vllm_config()
        skip = tuple(own_settings(vllm_config).get("skip_patches", ()))
        if vllm_config.speculative_config is not None:
            v2 = bool(getattr(vllm_config, "use_v2_model_runner", False))  # some releases have no such word
            check_running_config(vllm_config.speculative_config)
            if getattr(vllm_config, "lora_config", None) is not None:
                patches.apply_each(ADAPTER_PATCHES, skip)
            if v2:
                patches.apply_each(PASS_PATCHES, skip)
            if v2 and vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
                patches.apply_each(GRAPH_PATCHES, skip)
            if _samples(vllm_config):
                patches.apply_each([TEMPERATURE_PATCHES[v2], *(NOISE_PATCHES if v2 else ())], skip)
            complete_target(vllm_config)
        apply_cpu_patches(skip)
        prepare_proposer(own_settings(vllm_config))
        parent: Any = super().__new__
        worker: SpecWorkerExtension = parent(cls) if parent is object.__new__ else parent(cls, *args, **kwargs)
        worker._spec_state = _State()
        return worker

    def spec_look_at_draft(self) -> None:
        """Record the draft as it was loaded, by which one that was lost is known; nothing where one is recorded already."""
        self._spec_remember(self._spec_layout())

    def spec_install_file(
        self,
        path: str,
        version: int,
        digest: str,
        names: Iterable[str],
        draft_temperature: float = 1.0,
        force: bool = False,
        hold: bool = False,
    ) -> dict[str, Any]:
        """Swap the draft of a safetensors file in, all or nothing, on all tensor parallel ranks or on none.

        Never raises on content: the other ranks wait for this one's verdict.

        Args:
            path: of the file; the first rank's node can read it.
            version: draft version; must be newer than the served one.
            digest: of all tensors as the sender has them, a sha256 or a fingerprint (``draft_training.digest_like``).
            names: of the tensors that the sender sent.
            draft_temperature: at which its proposals are drawn, where the engine samples them.
            force: install although the version is not newer, e.g. after sleep level 2 or on resume.
            hold: keep the previous draft until ``spec_settle``, for a run of several engines.

        Returns:
            ``installed``, ``draft_version`` and ``digest`` (of what is served now), ``milliseconds``, ``reason`` (empty
            when installed).
        """
        started = time.perf_counter()
        state = self._spec_state
        state.previous, before = None, state.served
        backup: list[dict[str, Tensor]] = []
        marks: list[str] = []  # of the new weights
        reason = self._spec_try_install(path, version, digest, names, force, backup.append, marks.append)
        if reason is None:
            state.served = _Served(version, digest, marks[-1], draft_temperature)
            set_draft_temperature(find_draft(self), draft_temperature)
            state.previous = (before, backup[0]) if hold else None
        backup.clear()
        _give_back()
        return {
            "installed": reason is None,
            "draft_version": state.served.version,
            "digest": state.served.digest,
            "milliseconds": 1e3 * (time.perf_counter() - started),
            "reason": reason or "",
        }

    def spec_settle(self, keep: bool) -> None:
        """After an install with ``hold``: let go of the previous draft, or go back to it if one was installed.

        Raises:
            RuntimeError: if the previous weights could not be put back; the draft must not be served.
        """
        state = self._spec_state
        previous, state.previous = state.previous, None
        if previous is None:
            return
        served, backup = previous
        if not keep:
            state.served = served
            draft: Any = find_draft(self)  # is there, or nothing had been installed
            refresh.restore(self._spec_layout(), backup)
            repack(draft)
            set_draft_temperature(draft, served.draft_temperature)
        del previous, backup
        _give_back()

    def spec_pause_draft(self, paused: bool) -> bool:
        """Leave the draft's forward pass out while no batch size speculates; True if this worker can.

        With k = 0 vLLM still runs the draft once per step, so that its KV cache follows. Only pause for a phase in which
        every request starts and ends with k = 0, and reset the prefix cache before speculating again: the draft's KV
        cache has holes afterwards. Samples are the target's either way.
        """
        return pause_draft(self.model_runner, paused)

    def spec_take_rollouts(self, most_tokens: int | None = None, more: bool = False) -> list[tuple[bytes, bytes]]:
        """(prompt, response) of what was sampled since the last call, as ``Rollout`` has them; between phases only.

        Args:
            most_tokens: of the answer, but for a first one that is longer; None: all.
            more: what the call before has left over.
        """
        return [(rollout.prompt, rollout.response) for rollout in self._spec_memory().take(most_tokens, more)]

    def spec_remember(self, rollouts: Sequence[tuple[bytes, bytes]]) -> None:
        """Have the method draft from these (prompt, response) pairs, too."""
        self._spec_memory().remember(Rollout(*row) for row in rollouts)

    def spec_forget_rollouts(self) -> None:
        """Clear the method's memory of rollouts."""
        self._spec_memory().forget()

    def spec_take_shadow(self) -> tuple[int, list[int]]:
        """While k was 0: rounds that drafting would have taken, and how many of them would have accepted each position."""
        found: tuple[int, list[int]] = self._spec_memory().take_shadow()
        return found

    def _spec_memory(self) -> Any:
        """The memory that the method's ``proposer`` put on the drafter: take, remember, forget, take_shadow."""
        return self.model_runner.drafter.spec_memory

    def spec_audit(self) -> dict[str, Any]:
        """Digests of what this worker really holds: ``target``, its ``embed`` and ``head`` alone, ``draft``,
        ``draft_version``.

        The draft's is of its own weights as they are now, under their checkpoint names: the sender's, if that sent exactly the
        required names in the dtypes that are served. A draft of pruned vocabulary also sends ``t2d``, which vLLM does not keep.
        Of a shard no digest of the whole can be made: it is that of the draft whose shards were read back when they were
        installed, if they are still what they were then.
        """
        layout = self._spec_layout()
        model = self.model_runner.get_model()
        target = {name: p.detach() for name, p in model.named_parameters() if p.numel()} | _adapters(model)
        return {
            "target": weights_digest({name: t.cpu() for name, t in target.items()}),
            **self._spec_shared_digests(target),
            "draft": self._spec_held_digest(layout),
            "draft_version": self._spec_state.served.version,
        }

    def spec_rows(self) -> dict[str, dict[str, list[str]]]:
        """A digest of each row (last dimension) of every weight of the target by its name, for the conformance kit: how vLLM has
        packed them leaves rows as they are. In the engine's dtype, and in bfloat16.
        """
        model = self.model_runner.get_model()
        held = {n: t.detach().cpu() for n, t in (*model.named_parameters(), *model.named_buffers()) if t.numel()}
        own = {name: row_digests(tensor) for name, tensor in held.items()}
        return {"own": own, "bfloat16": {name: row_digests(tensor.bfloat16()) for name, tensor in held.items()}}

    def _spec_shared_digests(self, target: Mapping[str, Tensor]) -> dict[str, str]:
        """Digests of embedding and head without vocabulary padding; "" where each rank holds a shard."""
        whole = self.vllm_config.parallel_config.tensor_parallel_size == 1
        rows = self.vllm_config.model_config.get_vocab_size()
        bare = ((name.removesuffix(".weight").removesuffix(".base_layer"), tensor) for name, tensor in target.items())
        ends = {name.rpartition("model.")[2]: tensor for name, tensor in bare}
        embed = ends.get("embed_tokens")
        found = {"embed": embed, "head": ends.get("lm_head", embed)}  # a tied head has no name of its own
        return {n: weights_digest({"": t[:rows]}) if whole and t is not None else "" for n, t in found.items()}

    def _spec_held_digest(self, layout: Layout) -> str:
        if layout.problem is not None:
            return ""
        if self.vllm_config.parallel_config.tensor_parallel_size == 1:
            return refresh.live_digest(layout)
        self._spec_remember(layout)
        served = self._spec_state.served
        return served.digest if fingerprint(layout.parameters) == served.fingerprint else "not what was installed"

    def _spec_restore_constants(self, draft: Any) -> None:
        """Bring back buffers that sleep level 2 dropped: nothing else ever changes them (tables of rotary embeddings)."""
        kept, now = self._spec_state.constants, dict(draft.named_buffers())
        for name in kept.keys() & now.keys():
            buffer, mark = kept[name]
            if fingerprint({"": now[name]}) != mark:
                now[name].data.copy_(buffer)

    def _spec_layout(self) -> Layout:
        draft = find_draft(self)
        if draft is None:
            return Layout({}, {}, problem="no draft model in this worker")
        return draft_layout(draft, self.model_runner.get_model())

    def _spec_remember(self, layout: Layout) -> None:
        served = self._spec_state.served
        if layout.problem is not None or served.fingerprint is not None:
            return
        seen = fingerprint(layout.parameters)
        draft: Any = find_draft(self)  # is there, or the layout has a problem
        self._spec_state.constants = {
            name: (b.detach().to(HOST, copy=True), fingerprint({"": b})) for name, b in draft.named_buffers()
        }
        self._spec_state.served = _Served(served.version, refresh.live_digest(layout), seen)

    def _spec_try_install(
        self,
        path: str,
        version: int,
        digest: str,
        names: Iterable[str],
        force: bool,
        keep: Callable[[dict[str, Tensor]], None],
        mark: Callable[[str], None],
    ) -> str | None:
        layout, tensors, place = Layout({}, {}), dict[str, Tensor](), HOST
        try:
            if _samples(self.vllm_config):
                refuse_untempered(find_draft(self))
            arrived = _read_on_all_ranks(path)
            layout = self._spec_layout()
            place = _roomy_place(layout)
            tensors = {name: refresh.copied(tensor, place) for name, tensor in arrived.items()}
            self._spec_remember(layout)
            reason = refresh.check_arrived(layout, tensors, version, self._spec_state.served.version, digest, force)
            if reason is None and (lost := sorted(set(names) ^ tensors.keys())):
                reason = f"torn: not both sent and arrived: {lost}"
        except Exception as error:  # other ranks wait for this one's verdict
            reason = f"checking failed with {type(error).__name__}: {error}"
        if not _all_ranks(reason is None):
            return reason or "another tensor parallel rank refused it"
        draft: Any = find_draft(self)  # is there, or layout.problem had refused

        def load(weights: list[tuple[str, Tensor]]) -> None:
            self._spec_restore_constants(draft)
            draft.load_weights(weights)

        return refresh.swap(
            layout,
            tensors,
            load,
            agree=_all_ranks,
            settle=lambda: repack(draft),
            keep=keep,
            seal=lambda: mark(fingerprint(layout.parameters)),
            place=place,
        )


def _samples(vllm_config: Any) -> bool:
    """Does the engine draw its proposals from what the draft makes of them."""
    speculation = vllm_config.speculative_config
    return speculation is not None and speculation.draft_sample_method == "probabilistic"


def _roomy_place(layout: Layout) -> torch.device:
    """Where a refresh is checked and the draft before it kept: beside the draft on its GPU if that has room, else on the host."""
    own = list(layout.parameters.values())
    if not own or own[0].device.type != "cuda":
        return HOST
    free, _ = torch.cuda.mem_get_info(own[0].device)
    # what arrives is the whole draft on each rank, whose own part is kept; and as much again, by which they are checked
    needed = sum(math.prod(slot.shape) * slot.dtype.itemsize for slot in layout.slots.values()) + sum(
        p.nbytes for p in own
    )
    return own[0].device if free >= 2 * needed else HOST


def _give_back() -> None:
    """Let go of the GPU memory of a refresh, which torch would keep: the KV cache may be about to come back there."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _adapters(model: Any) -> dict[str, Tensor]:
    """LoRA adapters in the engine, by layer; vLLM keeps them in tensors that are no parameters."""
    return {
        f"{path}.{name}.{i}": tensor
        for path, module in model.named_modules()
        for name in ("lora_a_stacked", "lora_b_stacked")
        for i, tensor in enumerate(_tensors(getattr(module, name, ())))
    }


def _tensors(stacked: Any) -> tuple[Tensor, ...]:
    return (stacked,) if isinstance(stacked, Tensor) else tuple(stacked)


def _all_ranks(ok: bool) -> bool:
    """True if ``ok`` on every tensor parallel rank; a collective: every rank must call it equally often."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return ok
    flag = torch.tensor([int(ok)])
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(flag.item())


def _read_on_all_ranks(path: str) -> dict[str, Tensor]:
    """The tensors of a file; where ranks sit on nodes that do not have it, the first rank reads and broadcasts.

    Raises:
        OSError: if it cannot be read; on every rank.
    """
    tensors: dict[str, Tensor] = {}
    if _all_ranks(Path(path).exists()):
        tensors = load_file(path)
        return tensors
    from vllm.distributed.parallel_state import get_tp_group

    group: Any = get_tp_group()
    failure: str | None = None
    if group.rank_in_group == 0:
        try:
            tensors = load_file(path)
        except Exception as error:  # the other ranks wait for the broadcast
            failure = f"the first rank cannot read the draft in {path}: {type(error).__name__}: {error}"
    kinds = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    failure, kinds = group.broadcast_object((failure, kinds), src=0)
    if failure:
        raise OSError(failure)
    for name, shape, dtype in kinds:
        if group.rank_in_group:
            tensors[name] = torch.empty(shape, dtype=dtype)
        # bytes, since gloo does not carry every dtype
        torch.distributed.broadcast(tensors[name].view(-1).view(torch.uint8), group.first_rank, group=group.cpu_group)
    return tensors


def _current_vllm_config() -> Any:
    """For a trainer's extension that comes first and passes no arguments on: vLLM makes workers under its config."""
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config()
