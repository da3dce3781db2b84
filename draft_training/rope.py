"""Rope: rotary position embedding of drafts, read from a config.json and written as transformers and vLLM read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draft_training.errors import DraftConfigError
from draft_training.outside import TARGET, Layer, Rotary, read, show

ROPE_TYPES = ("default", "linear", "llama3")
_OF_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding, with the scaling types whose frequencies equal transformers' and vLLM's."""

    theta: float = 10000.0
    type: str = "default"  # one of ROPE_TYPES
    factor: float = 1.0  # linear, llama3
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position_embeddings: int = 8192  # llama3

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], where: str = TARGET) -> Rope:
        """Read ``rope_theta`` and ``rope_parameters`` (transformers 5) or ``rope_scaling`` (transformers 4).

        Args:
            hf: the parsed config.json.
            where: the file, for the messages.

        Raises:
            DraftConfigError: for a scaling type other than ROPE_TYPES, for partial rotation, and for missing or bad numbers.
        """
        layer = read(Layer, hf, where)
        raw = {**(layer.rope_scaling or {}), **(layer.rope_parameters or {})}
        kind = str(raw.get("rope_type", raw.get("type", "default")))
        if kind not in ROPE_TYPES or any(isinstance(value, Mapping) for value in raw.values()):
            raise DraftConfigError(
                f"the rope scaling {show(raw)} of {where} is not supported; the draft knows {', '.join(ROPE_TYPES)}: "
                "use another method for this target"
            )
        told = read(Rotary, raw, f"the rope scaling of {where}")
        partial = told.partial_rotary_factor or layer.partial_rotary_factor or 1.0
        if partial != 1.0:
            raise DraftConfigError(f"partial_rotary_factor={partial} in {where} is not supported; use another method")
        theta = told.rope_theta or layer.rope_theta or 10000.0
        return cls(theta) if kind == "default" else cls._scaled(kind, theta, told, where)

    @classmethod
    def for_draft_of(cls, hf: Mapping[str, Any], where: str = TARGET) -> Rope:
        """That of a new draft: its target's, or plain with the target's theta where that is of a kind not known here.

        Partial rotation, sections for images (mrope), a rope for each kind of layer: a draft has none of them. It is given the
        positions of the text, and learns with what it has.

        Args:
            hf: of the target's config.json, the part for texts.
            where: the file, for the messages.
        """
        layer = read(Layer, hf, where)
        raw = {**(layer.rope_scaling or {}), **(layer.rope_parameters or {})}
        kinds = [part for part in raw.values() if isinstance(part, Mapping)]
        if kinds:  # one for each kind of attention: the draft attends to the whole text
            raw = dict(raw.get("full_attention") or kinds[0])
        kind = str(raw.get("rope_type", raw.get("type", "default")))
        plain = kind not in ROPE_TYPES or kinds or "partial_rotary_factor" in raw or layer.partial_rotary_factor
        if not plain:
            return cls.from_hf(hf, where)
        told = read(Rotary, {"rope_theta": raw.get("rope_theta")}, f"the rope scaling of {where}")
        return cls(told.rope_theta or layer.rope_theta or 10000.0)

    @classmethod
    def _scaled(cls, kind: str, theta: float, told: Rotary, where: str) -> Rope:
        names = ("factor",) if kind == "linear" else _OF_LLAMA3
        numbers = {name: getattr(told, name) for name in names}
        if missing := sorted(name for name, number in numbers.items() if number is None):
            raise DraftConfigError(f"the rope scaling {kind!r} of {where} lacks {missing}; add them there")
        rope = cls(theta=theta, type=kind, **numbers)
        if kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
            raise DraftConfigError(
                f"low_freq_factor={rope.low_freq_factor} in {where} must be below high_freq_factor={rope.high_freq_factor}; "
                "correct it there"
            )
        return rope

    def scaling_to_hf(self) -> dict[str, Any] | None:
        """The scaling as transformers and vLLM read it, without theta; None for the default type."""
        if self.type == "default":
            return None
        scaling: dict[str, Any] = {"rope_type": self.type, "factor": self.factor}
        if self.type == "llama3":
            scaling["low_freq_factor"] = self.low_freq_factor
            scaling["high_freq_factor"] = self.high_freq_factor
            scaling["original_max_position_embeddings"] = self.original_max_position_embeddings
        return scaling
