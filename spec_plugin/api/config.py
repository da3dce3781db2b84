"""SpecConfig: every option with its default, unit and bounds, parsed once at the edge and frozen."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from spec_plugin.api.errors import SpecConfigError

#: the section of a trainer's configuration that holds our options, and how similar a misspelt name of it is
NAME, _SIMILAR = "spec", 0.75
#: names that somebody may give to that section
_OTHER_NAMES = ("spec_plugin", "spec-plugin", "specplugin")


class SpecConfig(BaseModel):
    """Options of spec-plugin. All have defaults; none is needed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, protected_namespaces=(), allow_inf_nan=False)

    method: str = Field(
        "eagle3",
        description="drafting method: eagle3; draft_model (a small language model); mtp (the target's own multi-token-prediction "
        "layer); suffix (continuations of earlier rollouts); ngram (repeats within the text); frozen (any draft "
        "that vLLM loads, not trained); auto (chosen from the target); or a plugin's",
    )
    k: int = Field(
        8, ge=1, le=16, description="most tokens drafted for one request in one step; the controller chooses up to that"
    )
    draft: str | None = Field(
        None,
        min_length=1,
        description="draft to start from (EAGLE-3 in vLLM's, EAGLE's or speculators' layout; a causal LM): a folder, owner/name "
        "or owner/name@revision of the Hugging Face hub; none: a new, untrained one",
    )
    draft_vocab_size: int | None = Field(
        None,
        ge=32,
        le=2**24,
        description="tokens that a new draft may propose: those sampled most in the latest rollouts; the target's "
        "vocab_size: all; none: as many as weigh no more than the rest of the draft, 32768 at most",
    )
    aux_layers: tuple[int, ...] | None = Field(
        None,
        description="target layers whose inputs the draft reads; none: (2, L//2, L-3) of L layers, (1, L//2, L-1) of fewer "
        "than 7",
    )
    draft_sample_method: Literal["auto", "greedy", "probabilistic"] = Field(
        "auto",
        description="how a draft proposes tokens: greedy, its likeliest ones; probabilistic, draws from it; auto: what training "
        "finds to be accepted more often, where the engine can change it. All are exact (on vLLM 0.24 to 0.28 by a repair)",
    )
    serve: Literal["auto", "always", "never"] = Field(
        "auto",
        description="auto: draft only where it beats plain decoding; always: from the first step; never: train the draft only",
    )

    train: bool = Field(
        True, description="train the draft online, on hidden states captured in the trainer's forward passes"
    )
    train_share: float = Field(
        0.10,
        ge=0.0,
        le=0.5,
        description="most time for draft training in a step, as a fraction of what generation without drafts would make the "
        "trainer wait; less is taken where it no longer helps",
    )
    head_start: float = Field(
        1.0,
        ge=0.0,
        le=10.0,
        description="extra training time for an untrained draft, as a multiple of one rollout's duration; spent only where "
        "it is predicted to pay back within three steps; 0: none",
    )
    train_max_steps: int = Field(128, ge=1, le=10_000, description="most draft optimizer steps per trainer step")
    train_tokens: int | None = Field(
        None,
        ge=32,
        le=1_048_576,
        description="tokens per draft optimizer step, the longest context as well; none: 8192 on a GPU, 512 on a CPU",
    )
    lr: float = Field(
        0.1,
        gt=0.0,
        le=1.0,
        description="peak learning rate of the draft's optimizer (Muon); need not change with the model's size",
    )
    buffer_tokens: int = Field(
        65_536, ge=256, le=2**31, description="most tokens with hidden states kept per actor process"
    )
    buffer_mb: int = Field(
        1024, ge=1, le=2**24, description="most MiB of captured hidden states kept per actor process"
    )
    harvest_tokens: int = Field(
        16_384,
        ge=32,
        le=2**31,
        description="most tokens whose hidden states are captured per trainer step and actor process; in the first, up to four "
        "times as many, as far as the buffer holds them",
    )
    memory_tokens: int = Field(
        4_194_304,
        ge=1024,
        le=2**34,
        description="most tokens of earlier rollouts that suffix keeps in each engine (about 310 bytes of memory each)",
    )

    recurrent_states: Literal["shown", "try"] = Field(
        "shown",
        description="targets with recurrent states (gated delta nets, Mamba). shown: accept them only with actor backends "
        "validated end to end; try: with any backend",
    )
    self_test: bool = Field(
        True,
        description="statistical self-test on the engine before a draft is first served; it rejects a correct engine once in a "
        "million runs",
    )
    self_test_seconds: float = Field(
        30.0,
        ge=1.0,
        le=600.0,
        description="seconds for the self-test, half of them before the first rollout where the draft knows nothing yet; up to "
        "four times that where less would prove nothing",
    )
    on_self_test_failure: Literal["raise", "plain"] = Field(
        "raise",
        description="raise: stop before a draft is served; plain: train on without drafts (as when time ran out)",
    )
    logprob_tolerance: float | None = Field(
        None,
        gt=0.0,
        allow_inf_nan=True,
        description="fixed bound on a batch's mean |rollout - recomputed| log-prob; none: measured on text of this run that was "
        "sampled without drafts",
    )
    control_share: float = Field(
        0.02,
        ge=0.0,
        le=1.0,
        description="fraction of requests in which 64 tokens are decoded without drafts, the log-prob check's reference; 0: none",
    )
    unsampled_rows: Literal["refuse", "allow"] = Field(
        "refuse",
        description="rows with tokens that no engine of this run has sampled, where the trainer is synchronous. refuse: stop; "
        "allow: the trainer replays, edits or tokenises again on purpose",
    )
    bypass_check_sequences: int = Field(
        8,
        ge=1,
        le=2**31,
        description="sequences recomputed per step to verify the engine's log-probs where the trainer skips its log-prob pass",
    )
    refresh_timeout_s: float = Field(
        60.0, gt=0.0, le=86_400.0, description="seconds after which a refresh without an answer counts as failed"
    )
    recoveries: int = Field(
        5,
        ge=0,
        le=64,
        description="fresh starts after drafting has failed (new refresh, self-test, a plain phase to compare with), 8 weight "
        "syncs later (1 where a self-test ran out of time), then 16, 32, ...; 0: drafts stay off",
    )
    gate_timeout_s: float = Field(
        600.0,
        gt=0.0,
        le=604_800.0,
        description="seconds for which engines apart from the trainer hold requests back after a weight sync, until the draft is "
        "installed and tested; then they roll out without drafts",
    )
    sleep_level: int = Field(
        1,
        ge=1,
        le=2,
        description="verl: how deep an engine sleeps between rollouts. 1: its weights wait in the host's memory; 2: they are "
        "dropped, as without the flag, and the draft comes back with its refresh (no GPU has shown that yet)",
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="seed of the draft's weights and of the draws in its training")
    block: tuple[str, ...] = Field((), description="names of plugins not to load")
    plugins: tuple[str, ...] = Field(
        (),
        description="plugins to add, as module:attribute, or module:Class=argument to make an instance with a string",
    )
    audit: bool = Field(
        False,
        description="hash what the engines hold (target and draft) around each rollout and refresh; for debugging",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("true and false belong to switches")
        return value

    @classmethod
    def parse(cls, raw: Mapping[str, Any] | None, prefix: str = "spec.") -> SpecConfig:
        """Parse raw options from a trainer's configuration.

        Args:
            raw: option name to value, as the trainer's own parser left it; None means all defaults.
            prefix: how the user writes an option there, for the error messages.

        Raises:
            SpecConfigError: naming each bad option, its value, the allowed range and, for an unknown one, the nearest name.
        """
        try:
            return cls(**{str(name): value for name, value in (raw or {}).items()})
        except ValidationError as error:
            raise SpecConfigError("; ".join(_explain(e, prefix) for e in error.errors())) from None


def _explain(error: Any, prefix: str) -> str:
    name, value = str(error["loc"][0]), error["input"]
    option = f"{prefix}{name}"
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, SpecConfig.model_fields, n=1, cutoff=0.5)
        hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(SpecConfig.model_fields)}"
        return f"unknown option {option}={_short(value)}; {hint}"
    return f"{option}={_short(value)}: {error['msg'].lower()}; allowed: {describe_range(name)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:60]}…"


def describe_range(name: str) -> str:
    """The type and bounds of an option in words: ``int >= 1 and <= 16``."""
    schema = SpecConfig.model_json_schema()["properties"][name]
    words = []
    for branch in schema.get("anyOf", [schema]):
        if "enum" in branch:
            words.append(" | ".join(branch["enum"]))
            continue
        low = _bound(branch, "minimum", ">=") or _bound(branch, "exclusiveMinimum", ">")
        high = _bound(branch, "maximum", "<=") or _bound(branch, "exclusiveMaximum", "<")
        bounds = " and ".join(b for b in (low, high) if b)
        kind = {"integer": "int", "number": "float", "string": "text", "boolean": "true | false", "null": "none"}
        kind_name = kind.get(branch["type"], "list")
        words.append(f"{kind_name} {bounds}".strip())
    return " or ".join(words)


def _bound(branch: Mapping[str, Any], key: str, sign: str) -> str:
    if key not in branch:
        return ""
    return f"{sign} {branch[key]}" if isinstance(branch[key], int) else f"{sign} {branch[key]:g}"


def meant_for_us(name: str, value: Any) -> bool:
    """Is this section of a trainer's configuration most likely ours: named ``spec`` or nearly so, with our options in it.

    Args:
        name: of the section.
        value: what is in it.
    """
    lower = name.lower()
    similar = lower in _OTHER_NAMES or difflib.SequenceMatcher(None, lower, NAME).ratio() >= _SIMILAR
    options = [str(option) for option in value] if isinstance(value, Mapping) else []
    return similar and any(
        difflib.get_close_matches(option, SpecConfig.model_fields, n=1, cutoff=0.8) for option in options
    )


def described_options() -> list[tuple[str, str, str, str]]:
    """Name, default, allowed values and meaning of every option."""
    return [
        (
            name,
            "none" if field.default is None else str(field.default).replace("()", "[]"),
            describe_range(name),
            str(field.description),
        )
        for name, field in SpecConfig.model_fields.items()
    ]


def options_table() -> str:
    """All options as a Markdown table; the copy in docs/reference/options.md is checked against it in CI."""
    rows = ["| option | default | allowed | meaning |", "| --- | --- | --- | --- |"]
    for name, *cells in described_options():
        rows.append(" | ".join([f"| `{name}`", *(cell.replace("|", "\\|") for cell in cells)]) + " |")
    return "\n".join(rows)
