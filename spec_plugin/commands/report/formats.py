"""How a trainer writes down its steps: each adapter says it in ``log.json``, which is read without importing the adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from spec_plugin.commands.adapters import installed_adapters
from spec_plugin.plan.sources import source_of

#: no run comes to this step; a number beyond it is a time, or no step at all
MOST_STEPS = 1_000_000
#: the report's own names for what every trainer measures, means of a step; docs/reference/metrics.md says what they are
_TIMES = Literal["step_s", "generation_s", "ms_per_token"]
Name = _TIMES | Literal["reward", "response_tokens", "samples", "staleness", "lr", "entropy", "grad_norm"]


class LogFormat(BaseModel):
    """What one trainer writes besides TensorBoard's event files, and what it calls its numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    trainer: str
    option: str  # with which it writes something that is read here
    json_lines: str | None = None  # key of the numbers in an object of JSON; empty: they stand beside ``step``
    state_file: str | None = None  # of each checkpoint, with all steps so far: a pattern, ``checkpoint-*/state.json``
    state_steps: str = ""  # key of the list of steps in it
    names: Mapping[Name, str]  # the trainer's own names

    def own_names(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The trainer's numbers under the report's names; those that it did not log are missing."""
        return {name: metrics[theirs] for name, theirs in self.names.items() if theirs in metrics}


def log_formats() -> list[LogFormat]:
    """Of all adapters that are installed here and have such a file.

    Raises:
        pydantic.ValidationError: if one is not as it should be.
    """
    packages = dict.fromkeys(entry.module.partition(".")[0] for entry in installed_adapters().values())
    texts = [source_of(package, "log.json") for package in packages]
    return [LogFormat.model_validate_json(text) for text in texts if text]


def step_in(record: object, formats: Sequence[LogFormat]) -> tuple[int, dict[str, float]] | None:
    """A step's number and its metrics, from an object of JSON all of whose numbers are floats.

    Where a trainer's numbers stand beside the step, only its own step time tells a step from a rollout or an evaluation.

    Returns:
        None if no trainer writes a step like it.
    """
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(step, float) or not abs(step) <= MOST_STEPS:
        return None
    for form in formats:
        inner = record.get(form.json_lines) if form.json_lines else record
        if form.json_lines is not None and isinstance(inner, dict):
            metrics = {name: value for name, value in inner.items() if isinstance(value, float)}
            if form.json_lines or "step_s" in form.own_names(metrics):
                return int(step), metrics
    return None
