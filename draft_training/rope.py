"""Rope: rotary position embedding of drafts, read from a config.json and written as transformers and vLLM read it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draft_training.errors import DraftConfigError
from draft_training.outside import TARGET, Layer, Rotary, is_size, read, short_repr, text_part

#: the scaling types that a draft may have, and the numbers of each as transformers and vLLM name them
_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
}
#: of yarn, which transformers and vLLM's rotary embedding for Llama do not read alike
_NOT_OF_YARN = (
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "attn_factor",
    "extrapolation_factor",
    "apply_yarn_scaling",
)
#: fields of a config.json in which vLLM looks for the longest text
_LENGTHS = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions"),
    *("max_sequence_length", "max_seq_length", "seq_len"),
)
#: numbers above it are no model's, and said where the field is read
_LARGEST = 1 << 40


def derived_length(hf: Mapping[str, Any]) -> tuple[str, int] | None:
    """The field that bounds a text, and the tokens that vLLM derives from it, as its ``_get_and_verify_max_len`` does.

    Args:
        hf: config.json of a model, a target's or a draft's.

    Returns:
        None where it names no bound, or scales it in a way unknown here.
    """
    text = text_part(hf)
    bounds: list[tuple[int, str]] = [(text[field], field) for field in _LENGTHS if is_size(text.get(field))]
    if is_size(text.get("model_max_length")):  # which vLLM prefers to all others
        bounds = [(text["model_max_length"], "model_max_length")]
    if not bounds:
        return None
    bound, field = min(bounds)
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or "gemma3" in str(hf.get("model_type")):
        return field, bound  # Gemma's bound is scaled already
    nested = [part for part in rope.values() if isinstance(part, Mapping)]
    factor: float = 1.0
    for part in nested or [rope]:
        kind = part.get("rope_type", part.get("type", "default"))
        if kind in ("su", "longrope", "llama3"):
            continue
        factor = part.get("factor") or factor
        if kind == "yarn":
            bound = part.get("original_max_position_embeddings", bound)
    if not (
        isinstance(factor, (int, float)) and isinstance(bound, int) and 0 < bound <= _LARGEST and 0 < factor <= _LARGEST
    ):
        return None
    return field, int(bound * factor)


def _parameters(layer: Layer) -> dict[str, Any]:
    """A config.json's rope, as transformers reads it: ``rope_scaling`` where it is there, and then nothing of the other."""
    return dict(layer.rope_scaling or layer.rope_parameters or {})


def _type(parameters: Mapping[str, Any]) -> Any:
    return parameters.get("rope_type", parameters.get("type", "default"))


def _unsupported(layer: Layer, parameters: Mapping[str, Any], where: str) -> str | None:
    """Why a draft cannot turn its positions so, and what to do; None if it can."""
    kind = _type(parameters)
    if not isinstance(kind, str) or kind not in _NUMBERS or any(isinstance(v, Mapping) for v in parameters.values()):
        return (
            f"the rope scaling {short_repr(dict(parameters))} of {where} is not supported; the draft knows "
            f"{', '.join(_NUMBERS)}: use another method for this target"
        )
    if kind == "yarn" and (strange := [name for name in _NOT_OF_YARN if parameters.get(name) is not None]):
        return (
            f"the rope scaling of {where} sets {', '.join(strange)}, which transformers and vLLM do not read alike; take a "
            "draft without"
        )
    partial = [parameters.get("partial_rotary_factor"), layer.partial_rotary_factor]
    if turned := [share for share in partial if share not in (None, 1.0)]:
        return f"partial_rotary_factor={short_repr(turned[0])} in {where} is not supported; use another method"
    return None


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding, with the scaling types whose frequencies vLLM and transformers compute alike."""

    theta: float = 10000.0
    type: str = "default"  # or linear, llama3, yarn
    factor: float = 1.0  # linear, llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position_embeddings: int = 8192  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the range between the two in whole dimensions

    @property
    def reach(self) -> float:
        """Positions that the engine has room for; infinite where the model's own maximum decides."""
        return self.factor * self.original_max_position_embeddings if self.type == "yarn" else math.inf

    def positions_for(self, length: int, least: int) -> int:
        """``max_position_embeddings``, at least ``least``, with which a model of this rope reads texts of ``length`` tokens."""
        stretch = self.factor if self.type == "linear" else 1.0
        return least if self.type == "yarn" else max(least, math.ceil(length / stretch))

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], where: str = TARGET) -> Rope:
        """Read ``rope_theta`` and ``rope_parameters`` (transformers 5) or ``rope_scaling`` (transformers 4).

        Args:
            hf: the parsed config.json.
            where: the file, for the messages.

        Raises:
            DraftConfigError: for another scaling type, for partial rotation, and for missing or bad numbers.
        """
        layer = read(Layer, hf, where)
        parameters = _parameters(layer)
        if why := _unsupported(layer, parameters, where):
            raise DraftConfigError(why)
        scaling, kind = read(Rotary, parameters, f"the rope scaling of {where}"), _type(parameters)
        numbers = {name: getattr(scaling, name) for name in _NUMBERS[kind]}
        if missing := sorted(name for name, number in numbers.items() if number is None):
            raise DraftConfigError(f"the rope scaling {kind!r} of {where} lacks {missing}; add them there")
        rope = cls(scaling.rope_theta or layer.rope_theta or 10000.0, kind, **numbers)
        if kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
            raise DraftConfigError(
                f"low_freq_factor={rope.low_freq_factor} in {where} must be below high_freq_factor={rope.high_freq_factor}; "
                "correct it there"
            )
        return rope

    @classmethod
    def for_draft_of(cls, hf: Mapping[str, Any], where: str = TARGET, length: int = 0) -> Rope:
        """That of a new draft: its target's, or plain with the target's theta where that is of a kind not known, or too short.

        Partial rotation, sections for images (mrope), a rope for each kind of layer: a draft has none of them. It is given the
        positions of the text, and learns with what it has.

        Args:
            hf: of the target's config.json, the part for texts.
            where: the file, for the messages.
            length: tokens that it must reach, beside the target's ``max_position_embeddings``.

        Raises:
            DraftConfigError: for missing or bad numbers of a kind that is known.
        """
        layer = read(Layer, hf, where)
        parameters = _parameters(layer)
        # Llama 4: nothing lies between the two, where a draft's would be divided by their difference
        low, high = parameters.get("low_freq_factor"), parameters.get("high_freq_factor")
        level = _type(parameters) == "llama3" and low is not None and low == high
        if not isinstance(_type(parameters), str) or not (level or _unsupported(layer, parameters, where)):
            made = cls.from_hf(hf, where)
            return made if made.reach >= max(layer.max_position_embeddings, length) else cls(made.theta)
        # where each kind of attention has a rope of its own, that of the one which reads the whole text, as the draft does
        kinds = {name: part for name, part in parameters.items() if isinstance(part, Mapping)}
        chosen = kinds.get("full_attention") or next(iter(kinds.values()), parameters)
        scaling = read(Rotary, {"rope_theta": chosen.get("rope_theta")}, f"the rope scaling of {where}")
        return cls(scaling.rope_theta or layer.rope_theta or 10000.0)

    def scaling_to_hf(self) -> dict[str, Any] | None:
        """The scaling as transformers and vLLM read it, without theta; None for the default type."""
        if self.type == "default":
            return None
        return {"rope_type": self.type, **{name: getattr(self, name) for name in _NUMBERS[self.type]}}
