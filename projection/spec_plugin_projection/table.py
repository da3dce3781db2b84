"""Prints a projection: a table, its sources, and its limitations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from spec_plugin.api.speculation import in_words
from spec_plugin.commands.graphs import graphs_of
from spec_plugin.plan.model_runner import A_TRAINED_DRAFT, Cluster
from spec_plugin.plan.sources import folder_of
from spec_plugin_projection.constants import KNOWN, MEASURED_ON
from spec_plugin_projection.measured import Measured
from spec_plugin_projection.projecting import AUTO, Estimate, ProjectedRow, Projection, Question

#: of the JSON: raised when a key is taken away or gets another meaning
SCHEMA = 1
_ALL_K = {0: "plain", AUTO: "by batch size"}
#: of the table's numbers
LEGEND = (
    "x: times as fast as plain, without the flag; the median of draws of what is below, in brackets nine of ten of them"
)
#: constants that are not of the engine
_TRAINERS = {"training_reached", "recomputation", "prepare_s"}


def rows_table(question: Question, answer: Projection) -> Table:
    """The projection as a table with one line for each k."""
    table = Table(box=None, pad_edge=False)
    names = ["k", "tokens a step", "rollouts, s", "rollouts, x", "trainer step, s", "trainer step, x"]
    for name in [*names, *(["exposed, s"] if question.lag else [])]:
        table.add_column(name, justify="left" if name == "k" else "right")
    for row in answer.rows:
        table.add_row(*(Text(cell) for cell in _cells(question, row)))
    return table


def _cells(question: Question, row: ProjectedRow) -> Iterator[str]:
    yield _ALL_K.get(row.k, str(row.k))
    yield "–" if row.k == AUTO else f"{row.tokens:.2f}"
    yield _seconds(row.rollout_s)
    yield "1" if row.k == 0 else row.rollout_speedup.text()
    yield _seconds(row.step_s)
    yield "1" if row.k == 0 else row.step_speedup.text()
    if question.lag:
        yield _seconds(row.exposed_s)


def _seconds(span: Estimate) -> str:
    """Three digits at most behind the comma, none from 100 s on."""
    return span.text(".0f" if span.high >= 100 else ".1f" if span.high >= 10 else ".2f")


def question_lines(question: Question, answer: Projection, calibrated: bool) -> Iterator[str]:
    """What is projected, as it was understood; a line each."""
    d = question.deployment
    split = f"{question.engines} engines of {d.tp} GPU{'s' * (d.tp > 1)}"
    split += f", experts over {d.ep}" if d.ep > 1 else ""
    trainer = "the same" if question.train_gpus is None else f"{question.train_gpus} others"
    ahead = f"rollouts {question.lag} policy versions ahead" if question.lag else "rollouts and training in turn"
    sizes = f"{d.model.parameters / 1e9:.4g}B parameters, of which a token uses {d.model.active_parameters / 1e9:.3g}B"
    yield f"{d.model.name} ({d.model.source}; {sizes})"
    yield f"on {question.gpus} {d.card.name}: {split}; trained on {trainer}, {ahead}"
    full = "what its KV cache holds" if answer.seats < question.seats else "--seats"
    yield (
        f"{question.batch} responses a step, {question.group} to each prompt of {question.prompt} tokens; "
        f"lengths: {question.lengths.described}; an engine runs at most {answer.seats} at once ({full})"
    )
    lengths = ", ".join(f"k={k}: {length:.3g}" for k, length in sorted(question.acceptance.items()))
    yield f"tokens a step: {lengths}; for another k each token is accepted as often as the nearest one of these"
    s = answer.stages
    yield (
        f"plain step: {s.prepare:.3g} s weight sync, {s.generation:.4g} s rollouts ({answer.phase.tail:.0%} of the "
        f"tokens in the last eighth of the batch), {s.logprob:.3g} s log-probs, {s.training:.3g} s training"
    )
    if calibrated:
        yield "plain: the calibrated engine, its draft paused; without the flag steps were 1.04 to 1.6 times as fast on an H100"
    chosen = next(row.table for row in answer.rows if row.k == AUTO)
    yield f"by batch size of one engine: {in_words(chosen)}" if any(chosen) else "by batch size: drafting does not pay"


def runner_lines(cluster: Cluster) -> Iterator[str]:
    """Which model runner and CUDA graphs the engine with the flag is taken to have, as ``spec-plugin check`` says it."""
    runner = cluster.runner_of(A_TRAINED_DRAFT)
    none = (
        ""
        if cluster.vllm or folder_of("vllm")
        else "; no vLLM is installed here: taken for 0.25 or later, --vllm names another"
    )
    yield f"model runner: {runner.words}{none}"
    yield f"CUDA graphs: {graphs_of(runner, cluster)}"
    cost = KNOWN["full_graphs_s" if runner.v2 else "piecewise_s"]
    guess = ", an estimate: nobody has measured V2 on a card with a k that changes" if runner.v2 else ""
    yield f"with the flag each step takes {1e3 * cost.low:g} to {1e3 * cost.high:g} ms longer, drafting or not{guess}"


def sources(question: Question, measured: Measured, calibrated: bool) -> Iterator[str]:
    """Sources, one a line: what was measured, then the constants with their ranges."""
    times, replaced = measured.times, set()
    lengths = ", ".join(f"k={k}: {length:.2f}" for k, length in sorted(measured.acceptance.items()))
    shown = [*([f"tokens a step ({lengths})"] if lengths else []), *(times.shown if times else ())]
    if shown:
        yield f"measured: {'; '.join(shown)} ({measured.source})"
    if measured.refused:
        yield f"not used: the times of {measured.source}: {measured.refused}"
    if calibrated:
        yield (
            "measured: all steps of the engine (--calibration, which does not say of which model and card); no constant of the "
            "engine is used"
        )
        replaced = set(KNOWN) - _TRAINERS
    replaced.add("piecewise_s" if question.full_graphs else "full_graphs_s")
    if times is not None:
        replaced |= {"draft_pass_s"} if times.break_even else set()
        replaced |= {"prepare_s"} if times.prepare_s is not None else set()
        both = times.logprob_s is not None and times.training_s is not None
        replaced |= {"training_reached", "recomputation"} if both else set()
    yield f"{question.deployment.card.name}: {question.deployment.card.source}"
    for name, constant in KNOWN.items():
        if name not in replaced:
            value = f"{constant.typical:.3g} ({constant.low:.3g}-{constant.high:.3g}) {constant.unit}"
            yield f"{value} {constant.meaning}: {constant.source}"


def limitations(question: Question) -> Iterator[str]:
    """What the ranges do not cover; a line each."""
    yield "acceptance is assumed to be the same for short and long responses; in a run, that of the longest decides"
    yield "ranges cover the constants and the draw of responses, not the batch, lengths and acceptance that you gave"
    card = question.deployment.card.name
    other = f"; for {card} there is its data sheet, at the shares of the peak that the {MEASURED_ON} reached"
    yield (
        f"vLLM with the flag was measured on one {MEASURED_ON} alone, with an 8B: docs/reference/projection-record.md has each "
        f"row beside what this says of it{'' if card == MEASURED_ON else other}"
    )
    yield (
        "RL runs of another system came out below (arXiv 2604.26779, 32 GB200, k=3: 1.77x and 1.53x where this, without the "
        "flag's own cost, says 2.4x and 2.0x, see examples/bench)"
    )
    if question.deployment.ep > question.deployment.tp:
        yield "experts are assumed to be used evenly, and engines that share them never to wait for each other"
    if window := question.deployment.model.window:
        yield f"layers with a window of {window} tokens are counted as full attention: they read less than that"
    if question.lag:
        yield f"with lag {question.lag}, {question.lag} batches are in the engines at once, and no response is cut short"


def to_json(question: Question, answer: Projection) -> dict[str, Any]:
    """For programs: the rows, and what was asked. docs/reference/metrics.md has the keys: new ones may come, none goes."""
    d = question.deployment
    return {
        "schema": SCHEMA,
        "asked": {
            "model": d.model.name,
            "card": d.card.name,
            "gpus": question.gpus,
            "tp": d.tp,
            "ep": d.ep,
            "batch": question.batch,
            "lengths": question.lengths.described,
            "acceptance": {str(k): v for k, v in question.acceptance.items()},
            "lag": question.lag,
            "train_gpus": question.train_gpus,
            "vllm_runner": "V2" if question.full_graphs else "V1",
        },
        "plain": asdict(answer.stages),
        "rows": [
            {"k": _ALL_K.get(row.k, row.k)} | {n: v for n, v in asdict(row).items() if n not in ("k", "table")}
            for row in answer.rows
        ],
    }
