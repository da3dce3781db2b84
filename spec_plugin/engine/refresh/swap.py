"""Law 5: a refresh of the draft is all or nothing. Pure functions on tensors, so that every fault can be injected.

A refresh is staged tensor by tensor, checked as a whole, swapped in place, read back and compared bit by bit. Anything
that goes wrong leaves the previous draft in place, and says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draft_training import digest, digest_like, is_fingerprint
from spec_plugin.engine.refresh.layout import Layout

NO_VERSION = -1  # the draft is still the one that the engine loaded at start
HOST = torch.device("cpu")


class Costs:
    """What one refresh takes in this worker, phase by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}  # by phase, in the order in which they began
        self.crossed = 0  # bytes that went from the host to the device or back
        self.phase = ""
        self._since = time.perf_counter()

    def begin(self, phase: str) -> None:
        """The phase before ends, with what it has set going on a GPU; the time until the first one belongs to none."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()
        now = time.perf_counter()
        if self.phase:
            self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self._since
        self.phase, self._since = phase, now

    def copied(self, tensor: Tensor, place: torch.device) -> Tensor:
        """A contiguous copy in ``place``, or on the host where there is no memory for it."""
        try:
            copy = tensor.detach().to(place, copy=True).contiguous()
        except torch.OutOfMemoryError:
            copy = tensor.detach().to(HOST, copy=True).contiguous()
        self.crossing(tensor, copy.device)
        return copy

    def crossing(self, tensor: Tensor, place: torch.device) -> None:
        """Count a tensor that is copied to ``place``, if that is not where it lies."""
        if tensor.device.type != place.type:
            self.crossed += tensor.nbytes


@dataclass
class Staging:
    """The tensors of one refresh while they arrive: where the draft is served, if there is room, else on the host."""

    version: int = NO_VERSION
    place: torch.device = HOST
    tensors: dict[str, Tensor] = field(default_factory=dict)
    problem: str | None = None  # first thing that was wrong with what arrived; reported when it is to be installed
    costs: Costs = field(default_factory=Costs)

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors into the staging area (transports reuse their buffers)."""
        self.costs.begin("staging")
        for name, tensor in tensors:
            if name in self.tensors:
                self.problem = self.problem or f"{name} arrived twice"
            self.tensors[name] = self.costs.copied(tensor, self.place)
        self.costs.begin("")  # waits for copies on a GPU: the transport may reuse its buffers now


def check_staged(
    layout: Layout, staging: Staging, version: int, served_version: int, digest: str, force: bool = False
) -> str | None:
    """Why a staged refresh must be refused, or None if it may be swapped in.

    Args:
        layout: what the running draft needs.
        staging: what has arrived.
        version: draft version to install; must be newer than ``served_version`` unless ``force``.
        served_version: draft version that the engine serves.
        digest: that the sender computed over all tensors of this refresh, a sha256 or a fingerprint.
        force: install a version that is not newer, e.g. after the engine lost its draft.
    """
    if layout.problem:
        return f"this draft cannot be refreshed: {layout.problem}"
    if staging.problem:
        return staging.problem
    if staging.version != version:
        return f"draft version {version} is to be installed, but {staging.version} is staged"
    if version <= served_version and not force:
        return f"stale: draft version {version} is not newer than the served {served_version}"
    staged = {layout.canonical(name): tensor for name, tensor in staging.tensors.items()}
    return _check_names(layout, staged) or _check_tensors(layout, staged) or _check_digest(staging, digest)


def _check_names(layout: Layout, staged: Mapping[str, Tensor]) -> str | None:
    owned = sorted(layout.shared.keys() & staged.keys())
    if owned:
        theirs = ", ".join(f"{name} is the target's own parameter ({layout.shared[name]})" for name in owned)
        return f"{theirs}; installing it would overwrite the policy"
    missing = sorted(layout.slots.keys() - staged.keys() - layout.optional)
    unknown = sorted(staged.keys() - layout.slots.keys() - layout.optional)
    if missing or unknown:
        return f"torn: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}"
    return None


def _check_tensors(layout: Layout, staged: Mapping[str, Tensor]) -> str | None:
    for name, tensor in staged.items():
        slot = layout.slots.get(name)
        if slot is None:  # optional and not loaded
            continue
        if tuple(tensor.shape) != slot.shape:
            return f"{name} has shape {tuple(tensor.shape)}, the draft needs {slot.shape}"
        if tensor.is_floating_point() != slot.dtype.is_floating_point:
            return f"{name} is {tensor.dtype}, the draft serves {slot.dtype}"
        cast = tensor.to(slot.dtype)  # a value may overflow in a narrower dtype
        if cast.is_floating_point() and not bool(torch.isfinite(cast).all()):
            bad = int((~torch.isfinite(cast)).sum())
            return f"{name} is not finite in {bad} of {cast.numel()} places, served as {slot.dtype}"
    if "d2t" in staged and "d2t" in layout.slots:
        offsets = staged["d2t"].long()
        ids = torch.arange(offsets.numel(), device=offsets.device) + offsets
        inside = bool(((ids >= 0) & (ids < layout.vocab_size)).all())
        if not inside or len(set(ids.tolist())) != ids.numel():
            return f"d2t maps draft tokens outside the target's {layout.vocab_size} tokens, or two to one"
    return None


def _check_digest(staging: Staging, told: str) -> str | None:
    if told and not is_fingerprint(told):  # computed on the host
        for tensor in staging.tensors.values():
            staging.costs.crossing(tensor, HOST)
    found = digest_like(told, staging.tensors)
    return None if found == told else f"digest differs: sent {told[:18]}…, arrived {found[:18]}…"


def mismatch(layout: Layout, tensors: Mapping[str, Tensor], costs: Costs | None = None) -> str | None:
    """Read the running weights back: name the first tensor that is not bit for bit what was sent, or None."""
    costs = costs or Costs()
    for sent_name, tensor in tensors.items():
        slot = layout.slots.get(layout.canonical(sent_name))
        if slot is None:
            continue
        live = slot.live(layout.parameters)
        shard = slot.shard(tensor, live)
        costs.crossing(shard, live.device)
        want = shard.to(device=live.device, dtype=live.dtype)
        if not torch.equal(live, want):
            wrong = int((live != want).sum())
            return f"read-back of {slot.name} differs in {wrong} of {live.numel()} places"
    return None


def swap(
    layout: Layout,
    tensors: Mapping[str, Tensor],
    load: Callable[[list[tuple[str, Tensor]]], object],
    agree: Callable[[bool], bool] = bool,
    settle: Callable[[], object] = lambda: None,
    keep: Callable[[dict[str, Tensor]], object] = lambda _backup: None,
    seal: Callable[[], object] = lambda: None,
    place: torch.device = HOST,
    costs: Costs | None = None,
) -> str | None:
    """Load ``tensors`` in place and verify them; on any failure put the previous weights back.

    Args:
        layout: of the running draft.
        tensors: checked by :func:`check_staged`.
        load: vLLM's ``load_weights`` of the draft.
        agree: takes "this rank succeeded", returns "all ranks did"; if not, every rank restores.
        settle: called after the weights have changed, for kernels that compute with packed copies of them.
        keep: called with the previous weights when the new ones are in place; see :func:`restore`.
        seal: called when the new ones have been read back; where it raises, they are taken back.
        place: where the previous weights are kept meanwhile.
        costs: takes note of what this takes.

    Returns:
        None when installed, else why the previous weights are back in place.

    Raises:
        RuntimeError: if the previous weights could not be put back either; the draft must not be served.
    """
    backup: dict[str, Tensor] = {}
    costs = costs or Costs()
    costs.begin("keeping the previous draft")
    reason: str | None = "interrupted"
    try:
        try:
            unsent = _unsent(layout, tensors)
            tensors = {**unsent, **tensors}
            kept = {name: costs.copied(p, place) for name, p in layout.parameters.items()}
            backup = kept | {layout.slots[name].parameter: tensor for name, tensor in unsent.items()}
            addresses = {name: p.data_ptr() for name, p in layout.parameters.items()}
            costs.begin("loading")
            wanted = [(name, t) for name, t in tensors.items() if layout.canonical(name) in layout.slots]
            for name, tensor in wanted:
                slot = layout.slots[layout.canonical(name)]
                live = slot.live(layout.parameters)
                costs.crossing(slot.shard(tensor, live), live.device)
            load(wanted)
            settle()
            costs.begin("reading back")
            moved = [name for name, p in layout.parameters.items() if p.data_ptr() != addresses[name]]
            reason = (
                f"{moved[0]} was replaced by another tensor while loading"
                if moved
                else mismatch(layout, tensors, costs)
            )
            if reason is None:
                costs.begin("making its fingerprint")
                seal()
        except Exception as error:
            reason = f"{type(error).__name__} while {costs.phase}: {error}"
        if not agree(reason is None):
            reason = reason or "another rank could not install it"
    finally:
        if reason is not None and backup:  # without one nothing was loaded here
            restore(layout, backup)
            settle()
    if reason is None:
        keep(backup)
    return reason


def _unsent(layout: Layout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What vLLM serves and no trainer sends: the map of an unpruned vocabulary, all zero, which sleep level 2 drops."""
    sent = {layout.canonical(name) for name in tensors}
    slots = [layout.slots[name] for name in sorted(layout.optional - sent) if name in layout.slots]
    return {slot.name: torch.zeros(slot.shape, dtype=slot.dtype) for slot in slots}


def restore(layout: Layout, backup: Mapping[str, Tensor]) -> None:
    """Put back the weights that ``swap`` gave to ``keep``.

    Raises:
        RuntimeError: if that fails; the draft must not be served.
    """
    for name, parameter in layout.parameters.items():
        parameter.data.copy_(backup[name])
        if not same_bits(parameter.detach().to(backup[name].device), backup[name]):
            raise RuntimeError(
                f"the previous draft could not be restored, {name} differs: do not serve this draft, restart the engine"
            )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Bitwise equality of two tensors of one dtype and shape; unlike ``==``, NaN equals itself."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def live_digest(layout: Layout) -> str:
    """The sha256 of the running weights, computed as the sender does, over their checkpoint names."""
    return digest({name: t.cpu().contiguous() for name, t in layout.live_tensors().items()})
