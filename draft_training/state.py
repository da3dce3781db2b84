"""TrainerState: all that training goes on from, as a value; written to a folder, read back, and sent among ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from draft_training.checkpoint import (
    digest_like,
    fingerprint,
    replacing_folder,
    settled_folder,
    write_json,
    write_tensors,
)
from draft_training.draft import DraftKind
from draft_training.errors import CheckpointError, DraftConfigError
from draft_training.files import own_fields, read_json
from draft_training.parallel import Ranks
from draft_training.weights import read_tensors

FORMAT = 1
#: of a state what is no tensor
_NUMBERS = ("draft_version", "policy_version", "newborn")


@dataclass(frozen=True)
class TrainerState:
    """All that training goes on from, bit by bit.

    The tensors are the trainer's own, not copies: they are to be written or sent before it trains on.
    """

    weights: Mapping[str, Tensor]  # of the draft, in the trainer's dtype
    #: the optimizer's as ``<kind>.<parameter>``, and the random stream as ``generator``, [.] uint8: they go to no engine
    own: Mapping[str, Tensor]
    draft_version: int
    policy_version: int
    newborn: bool  # see ``TrainingSchedule``


def write_state(
    path: str | Path,
    state: TrainerState,
    kind: DraftKind[Any],
    settings: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> str:
    """Write a folder, all or nothing; returns the fingerprint of the draft's tensors.

    Not their sha256, for which other ranks would wait: a fingerprint is made where the tensors lie, on a card in milliseconds.

    Args:
        path: the folder; ``path/draft`` is served by vLLM as it is.
        state: of the trainer.
        kind: of its draft.
        settings: with which it was trained, for whoever reads the file.
        extra: JSON-serialisable, handed back by ``read_state``.
    """
    with replacing_folder(path) as folder:
        (folder / "draft").mkdir()
        weights = kind.write(folder / "draft", state.weights)
        write_tensors(folder / "trainer.safetensors", state.own)
        about = {
            "format": FORMAT,
            **{name: getattr(state, name) for name in _NUMBERS},
            "settings": dict(settings),
            "draft_digest": weights,
            "trainer_digest": fingerprint(state.own),
            "extra": dict(extra),
        }
        write_json(folder / "trainer.json", about)
    return weights


def read_state(path: str | Path, kind: DraftKind[Any]) -> tuple[TrainerState, dict[str, Any]]:
    """What ``write_state`` wrote for a trainer of this kind of draft, verified by digest, and its ``extra``.

    Raises:
        CheckpointError: if a file is missing, torn or not what its digest says.
        DraftConfigError: if the saved draft has another shape.
    """
    folder = settled_folder(path)
    about = read_json(folder / "trainer.json")
    if about.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} has format {about.get('format')!r}, this version reads {FORMAT}: "
            "resume with the version that wrote it, or without the draft's checkpoint"
        )
    saved = own_fields(read_json(folder / "draft" / "config.json"))
    ours = json.loads(json.dumps(own_fields(kind.shape.to_hf())))  # as it was written
    if other := {name: (saved.get(name), value) for name, value in ours.items() if saved.get(name) != value}:
        raise DraftConfigError(
            f"the draft saved in {folder} differs from this run's in (saved, this run's) {other}; "
            "set the options as they were when it was saved, or resume from another folder"
        )
    weights = read_tensors(folder / "draft" / "model.safetensors")
    kind.check(weights)
    own = read_tensors(folder / "trainer.safetensors")
    for what, tensors, key in (("draft", weights, "draft_digest"), ("trainer.safetensors", own, "trainer_digest")):
        if digest_like(about[key], tensors) != about[key]:
            raise CheckpointError(f"{folder}: the digest of {what} does not match trainer.json; the checkpoint is torn")
    return TrainerState(weights, own, **{name: about[name] for name in _NUMBERS}), about["extra"]


def state_from_first(ranks: Ranks, state: TrainerState | None) -> TrainerState:
    """The first rank's state on every rank; it alone has one (collective)."""
    numbers = ranks.object_from_first({name: getattr(state, name) for name in _NUMBERS} if state else {})
    weights = ranks.tensors_from_first(state.weights if state else None)
    own = ranks.tensors_from_first(state.own if state else None)
    return TrainerState(weights, own, **numbers)
