"""Reads measurements from a run's metrics, or from a calibration file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median

from spec_plugin.api.errors import SpecConfigError
from spec_plugin.api.events import StepTiming
from spec_plugin.commands.report.formats import log_formats
from spec_plugin.commands.report.read import ReportError, runs_as_logged
from spec_plugin.plan.text_files import text_of
from spec_plugin_projection.lengths import MOST_TOKENS
from spec_plugin_projection.measured import Measured, StepTimes, Work
from spec_plugin_projection.projecting import MOST_RESPONSES

#: metrics of trainers, the first one that a step has: what it is -> names
_STAGES = {
    "generation": ("timing_s/gen", "timing/generation"),
    "logprob": ("timing_s/old_log_prob",),
    "training": ("timing_s/update_actor", "timing/ppo_train"),
    "prepare": ("timing_s/update_weights", "timing/broadcast"),
    "tokens": ("perf/total_num_tokens",),
    "mean": ("response_length/mean", "rollout/response_length_mean"),
    "longest": ("response_length/max",),
    "prompt": ("prompt_length/mean",),
}
_POSITION = re.compile(r"spec/acceptance_pos_(\d+)$")
_BREAK_EVEN = re.compile(r"spec/break_even_b(\d+)$")

Metrics = Mapping[str, float]


def read_run(run: Path) -> Measured:
    """The last half of a run's steps: acceptance, break-even and stages, medians.

    Args:
        run: whatever ``spec-plugin report`` reads: a folder of a run, or one of its files.

    Raises:
        SpecConfigError: if there is none, no step of it has a metric of the plugin, or several runs do.
    """
    try:
        runs = runs_as_logged(run, log_formats())
    except ReportError as error:
        raise SpecConfigError(f"--from {error}") from error
    flagged = [
        one for one in runs if any(_ours(step, "spec/acceptance_length") is not None for step in one.steps.values())
    ]
    if not flagged:
        raise SpecConfigError(f"--from {run}: no step of it has a metric of a run with the flag (spec/…)")
    if len(flagged) > 1:
        raise SpecConfigError(
            f"--from {run}: several runs with the flag are in it: name one of {', '.join(one.name for one in flagged)}"
        )
    file, steps = ", ".join(flagged[0].sources), [flagged[0].steps[step] for step in flagged[0].numbers]
    ours = [step for step in steps if _ours(step, "spec/acceptance_length") is not None]
    late = ours[len(ours) // 2 :]
    drafting = [step for step in late if (_ours(step, "spec/acceptance_length") or 1.0) > 1.0]
    source = f"{file}, steps {len(ours) - len(late) + 1} to {len(ours)} of those with the flag"
    return Measured(_acceptance(drafting), _times(late, _typical_k(drafting)), source)


def _times(steps: Sequence[Metrics], k: int) -> StepTimes | None:
    """What took how long, where the run says how much there was to do."""
    found = {name: _stage(steps, names) for name, names in _STAGES.items()}
    generation = _engine_seconds(steps) or found["generation"]
    tokens, mean, longest, prompt = (found[name] for name in ("tokens", "mean", "longest", "prompt"))
    if not generation or not tokens or not mean or not longest or prompt is None:
        return None
    if not 1 <= mean <= longest <= MOST_TOKENS or tokens / mean > MOST_RESPONSES:  # no rollouts of a step
        return None
    logprob, training = found["logprob"], found["training"]
    return StepTimes(
        work=Work(max(1, round(tokens / (mean + prompt))), mean, longest, prompt),
        generation_s=generation,
        k=k,
        break_even=_break_even(steps),
        logprob_s=None if logprob is None else logprob / tokens,
        training_s=None if training is None else training / tokens,
        prepare_s=found["prepare"],
    )


def read_calibration(file: Path) -> list[StepTiming]:
    """What the controller saves in a checkpoint: a list of objects, the fields of ``spec_plugin.api.events.StepTiming``.

    Raises:
        SpecConfigError: if it is not one.
    """
    try:
        rows = json.loads(text_of(file))
        if not isinstance(rows, list) or not rows:
            raise ValueError("it is no list of steps")
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError("what it lists must be a mapping each")
        known = {field.name for field in fields(StepTiming)}  # a checkpoint of before may have more
        steps = [StepTiming(**{name: value for name, value in row.items() if name in known}) for row in rows]
        if not all(isinstance(value, int | float) for step in steps for value in asdict(step).values()):
            raise ValueError("a value is no number")
        return steps
    except (OSError, ValueError, TypeError, RecursionError, SpecConfigError) as error:
        raise SpecConfigError(
            f"--calibration {file}: {error}; a JSON list of objects with batch, k, paused, seconds, steps and context"
        ) from error


def _ours(step: Metrics, name: str) -> float | None:
    """A metric of the plugin, whatever the trainer puts before its name."""
    return next((v for key, v in step.items() if math.isfinite(v) and (key == name or key.endswith(f"/{name}"))), None)


def _numbered(step: Metrics, pattern: re.Pattern[str]) -> dict[int, float]:
    named = ((pattern.search(key), value) for key, value in step.items() if math.isfinite(value))
    return {int(found[1]): value for found, value in named if found}


def _acceptance(steps: Sequence[Metrics]) -> dict[int, float]:
    """Tokens a step for each k that was drafted to, from the shares of verification steps that accepted each position."""
    lengths: dict[int, float] = {}
    shares = [_numbered(step, _POSITION) for step in steps]
    total = 1.0
    for position in range(16):
        here = [share[position] for share in shares if share.get(position, 0.0) > 0.0]
        if not here or len(here) < len(shares) / 2:
            break
        total += median(here)
        lengths[position + 1] = total
    return lengths


def _break_even(steps: Sequence[Metrics]) -> dict[int, tuple[int, float]]:
    found: dict[int, list[tuple[int, float]]] = {}
    for step in steps:
        for batch, length in _numbered(step, _BREAK_EVEN).items():
            k = _ours(step, f"spec/k_b{batch}")
            if k is not None and length >= 1.0:
                found.setdefault(batch, []).append((int(k), length))
    return {batch: sorted(seen)[len(seen) // 2] for batch, seen in found.items()}


def _typical_k(steps: Sequence[Metrics]) -> int:
    seen = [max(_numbered(step, re.compile(r"spec/k_b(\d+)$")).values(), default=0.0) for step in steps]
    return int(median(seen)) if seen else 0


def _engine_seconds(steps: Sequence[Metrics]) -> float | None:
    """Of rollouts, first request in to last out, which a trainer's own clock may round up."""
    seen = [seconds for step in steps if (seconds := _ours(step, "spec/generation_s"))]
    return median(seen) if seen else None


def _stage(steps: Sequence[Metrics], names: Sequence[str]) -> float | None:
    values = [next((step[name] for name in names if name in step), -1.0) for step in steps]
    known = [value for value in values if math.isfinite(value) and value >= 0]
    return median(known) if known else None
