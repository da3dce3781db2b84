"""Law 5: a refresh of the draft is all or nothing. Pure functions on tensors, so that every fault can be injected.

A refresh is checked as a whole, swapped in place, read back and compared bit by bit. Anything that goes wrong leaves the
previous draft in place, and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from draft_training import DraftConfigError, digest, digest_like
from draft_training.files import check_offsets
from spec_plugin.engine.refresh.layout import Layout

NO_VERSION = -1  # the draft is still the one that the engine loaded at start
HOST = torch.device("cpu")


def copied(tensor: Tensor, place: torch.device) -> Tensor:
    """A contiguous copy in ``place``, or on the host where there is no memory for it."""
    try:
        return tensor.detach().to(place, copy=True).contiguous()
    except torch.OutOfMemoryError:
        return tensor.detach().to(HOST, copy=True).contiguous()


def check_arrived(
    layout: Layout,
    tensors: Mapping[str, Tensor],
    version: int,
    served_version: int,
    digest: str,
    force: bool = False,
) -> str | None:
    """Why a refresh must be refused, or None if it may be swapped in.

    Args:
        layout: what the running draft needs.
        tensors: what has arrived.
        version: draft version to install; must be newer than ``served_version`` unless ``force``.
        served_version: draft version that the engine serves.
        digest: that the sender computed over all tensors of this refresh, a sha256 or a fingerprint.
        force: install a version that is not newer, e.g. after the engine lost its draft.
    """
    if layout.problem:
        return f"this draft cannot be refreshed: {layout.problem}"
    if version <= served_version and not force:
        return f"stale: draft version {version} is not newer than the served {served_version}"
    arrived = {layout.canonical(name): tensor for name, tensor in tensors.items()}
    return _check_names(layout, arrived) or _check_tensors(layout, arrived) or _check_digest(tensors, digest)


def _check_names(layout: Layout, arrived: Mapping[str, Tensor]) -> str | None:
    owned = sorted(layout.shared.keys() & arrived.keys())
    if owned:
        theirs = ", ".join(f"{name} is the target's own parameter ({layout.shared[name]})" for name in owned)
        return f"{theirs}; installing it would overwrite the policy"
    missing = sorted(layout.slots.keys() - arrived.keys() - layout.optional)
    unknown = sorted(arrived.keys() - layout.slots.keys() - layout.optional)
    if missing or unknown:
        return f"torn: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}"
    return None


def _check_tensors(layout: Layout, arrived: Mapping[str, Tensor]) -> str | None:
    for name, tensor in arrived.items():
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
    if "d2t" in arrived and "d2t" in layout.slots:
        try:
            check_offsets(arrived["d2t"], layout.vocab_size, "the refresh")
        except DraftConfigError as error:
            return str(error)
    return None


def _check_digest(tensors: Mapping[str, Tensor], told: str) -> str | None:
    found = digest_like(told, tensors)
    return None if found == told else f"digest differs: sent {told[:18]}…, arrived {found[:18]}…"


def mismatch(layout: Layout, tensors: Mapping[str, Tensor]) -> str | None:
    """Read the running weights back: name the first tensor that is not bit for bit what was sent, or None."""
    for sent_name, tensor in tensors.items():
        slot = layout.slots.get(layout.canonical(sent_name))
        if slot is None:
            continue
        live = slot.live(layout.parameters)
        want = slot.shard(tensor, live).to(device=live.device, dtype=live.dtype)
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
) -> str | None:
    """Load ``tensors`` in place and verify them; on any failure put the previous weights back.

    Args:
        layout: of the running draft.
        tensors: checked by :func:`check_arrived`.
        load: vLLM's ``load_weights`` of the draft.
        agree: takes "this rank succeeded", returns "all ranks did"; if not, every rank restores.
        settle: called after the weights have changed, for kernels that compute with packed copies of them.
        keep: called with the previous weights when the new ones are in place; see :func:`restore`.
        seal: called when the new ones have been read back; where it raises, they are taken back.
        place: where the previous weights are kept meanwhile.

    Returns:
        None when installed, else why the previous weights are back in place.

    Raises:
        RuntimeError: if the previous weights could not be put back either; the draft must not be served.
    """
    backup: dict[str, Tensor] = {}
    phase = "keeping the previous draft"
    reason: str | None = "interrupted"
    try:
        try:
            unsent = _unsent(layout, tensors)
            tensors = {**unsent, **tensors}
            kept = {name: copied(p, place) for name, p in layout.parameters.items()}
            backup = kept | {layout.slots[name].parameter: tensor for name, tensor in unsent.items()}
            addresses = {name: p.data_ptr() for name, p in layout.parameters.items()}
            phase = "loading"
            load([(name, t) for name, t in tensors.items() if layout.canonical(name) in layout.slots])
            settle()
            phase = "reading back"
            moved = [name for name, p in layout.parameters.items() if p.data_ptr() != addresses[name]]
            reason = f"{moved[0]} was replaced by another tensor while loading" if moved else mismatch(layout, tensors)
            if reason is None:
                phase = "making its fingerprint"
                seal()
        except Exception as error:
            reason = f"{type(error).__name__} while {phase}: {error}"
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
