"""A projection held against what was measured: which numbers were fitted, which predicted, and how far off they are."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from spec_plugin_projection.constants import Constants  # noqa: E402
from spec_plugin_projection.hardware import find_card  # noqa: E402
from spec_plugin_projection.lengths import lognormal  # noqa: E402
from spec_plugin_projection.measured import calibrated  # noqa: E402
from spec_plugin_projection.projecting import Overrides, ProjectedRow, Question, chances_through, max_running, project  # noqa: E402
from spec_plugin_projection.rollout import Workload, simulate  # noqa: E402
from spec_plugin_projection.roofline import Deployment, Roofline  # noqa: E402
from spec_plugin_projection.shapes import find_model  # noqa: E402

from draft_training.acceptance import conditional_acceptance  # noqa: E402
from spec_plugin.api.events import StepTiming  # noqa: E402
from spec_plugin.step_cost.chances import tokens_per_step  # noqa: E402
from spec_plugin.step_cost.model import CostModel  # noqa: E402

HELP = """Hold the projection of `spec-plugin project` against numbers that others, or we, have measured.

\b
  CPU      whole rollouts of our own engine, from its start-up calibration alone (projection_cpu.py measures both)
  8B       NVIDIA's measured rows with Qwen3-8B on 32 GB200 (arXiv 2604.26779)
  235B     their simulator's rows with Qwen3-235B-A22B

What is fitted and what is predicted is said in each line, with the error. Takes seconds.
"""
BENCH = Path(__file__).parent
PAPER = BENCH / "data" / "speculative_rollouts_paper.json"
CPU = BENCH / "results" / "projection-cpu.json"
#: rows by which constants are fitted; all others are predicted
FITTED = (("RL-Zero", 3), ("RL-Zero", 5))
FREE = ("products_reached", "draft_pass_s")
#: what the paper's transcription lacks: the public baselines of its first author (github.com/isomap/RL, experiments/rl_baselines,
#: 64 prompts of 16 responses; at most 32768 and 40960 tokens), which need not be the paper's
BATCH, GROUP, PROMPT = 1024, 16, 256
LONGEST = {"RL-Zero": 32768.0, "RL-Think": 40960.0}
#: how their simulator splits the model and how long its responses are is not in the transcription. Lengths: an assumption.
#: Split: that of these (tp, ep) whose drafted rollouts are the fastest here; experts lie over at most 64 of the 72 cards of
#: one NVLink domain
MEAN_235B, LONGEST_235B = 8000.0, 32768.0
SPLITS = ((4, 1), (8, 1), (16, 1), (1, 64), (2, 64), (4, 64), (8, 64))
#: NeMo RL's recipe grpo-qwen3-235b-16n4g.yaml: vLLM with tensor parallel 8
RECIPE = (8, 1)
_ELSEWHERE = (
    "same model and cards, so what differs is not in the transcription (lengths, batch, acceptance per position)"
)
#: what the paper's own numbers say where no cost of steps can be right: tokens a step / speed-up is what a step costs
WHY = {
    (
        "RL-Zero",
        7,
    ): "a drafted token costs 0.29 plain steps up to k=3, 0.57 from there on: nothing linear follows both",
    ("RL-Think", 5): f"a step costs 3.85 plain ones, RL-Zero's 3.02, and at k=3 both under 1.9; {_ELSEWHERE}",
    ("RL-Think", 7): f"a step costs 4.90 plain ones, RL-Zero's 4.18, and at k=3 both under 1.9; {_ELSEWHERE}",
}
#: draws of all other constants, for the ranges
DRAWS = 12
#: rollouts whose acceptance differs by so much from the calibration's are predicted with their own, too, for comparison
OTHER_ACCEPTANCE = 0.1
GOALS = {"CPU": 0.15, "8B": 0.15, "235B": 0.20}


@dataclass(frozen=True)
class Held:
    """One number, predicted and known."""

    part: str
    name: str
    how: str  # only "predicted" ones count
    predicted: float | None
    known: float
    low: float | None = None
    high: float | None = None
    unit: str = "x"
    note: str = ""

    @property
    def error(self) -> float | None:
        """Predicted / known - 1."""
        return None if self.predicted is None else self.predicted / self.known - 1


@click.command(help=HELP, context_settings={"max_content_width": 120, "show_default": True})
@click.option("--cpu", default=CPU, type=click.Path(path_type=Path), help="What projection_cpu.py wrote.")
@click.option("--out", default=ROOT / "runs" / "bench", type=click.Path(path_type=Path), help="Folder of JSON and PNG.")
def main(cpu: Path, out: Path) -> None:
    """Compare and report."""
    rows = all_rows(cpu)
    report(rows)
    out.mkdir(parents=True, exist_ok=True)
    content = {"benchmark": "projection", "results": [asdict(row) | {"error": row.error} for row in rows]}
    (out / "projection.json").write_text(json.dumps(content, indent=1) + "\n")
    write_picture(rows, out / "projection.png")
    click.echo(f"numbers: {out / 'projection.json'}, picture: {out / 'projection.png'}")


def all_rows(cpu: Path = CPU) -> list[Held]:
    """Every number that there is to compare with."""
    paper = json.loads(PAPER.read_text())
    rows = list(cpu_rows(json.loads(cpu.read_text()))) if cpu.exists() else []
    return [*rows, *rows_8b(paper["measured"]), *rows_235b(paper["projected"]["rows"])]


# ------------------------------------------------------------------------------------------------------ our own CPU


def cpu_rows(content: Mapping[str, Any]) -> Iterator[Held]:
    """Tokens per second of whole rollouts, and speed-ups, from the calibration: its steps and the acceptance of its requests."""
    results = content["results"]
    clock = "cpu" if content["settings"]["threads"] == 1 else "wall"
    calibration = results["calibration"]
    cost = calibrated([StepTiming(**step) for step in calibration["steps"][clock]])
    chances = conditional_acceptance(calibration["accepted_per_pos"], calibration["drafts"])
    predicted: dict[tuple[str, int], float] = {}
    measured: dict[tuple[str, int], float] = {}
    for row in results["rollouts"]:
        (regime, k), tokens = (key := (row["regime"], row["k"])), sum(row["lengths"])
        measured[key] = tokens / float(np.median(row["seconds"][clock]))
        predicted[key] = tokens / simulated(row, cost, chances)
        note = (
            f"{row['acceptance_length']:.2f} tokens a step, in the calibration {tokens_per_step(chances, k):.2f}"
            if k
            else ""
        )
        yield Held("CPU", f"{regime}, k={k}", "predicted", predicted[key], measured[key], unit="tok/s", note=note)
        if k:
            ours, theirs = (rates[key] / rates[regime, 0] for rates in (predicted, measured))
            yield Held("CPU", f"{regime}, k={k} against k=0", "predicted", ours, theirs, note=note)
        if k and abs(row["acceptance_length"] / tokens_per_step(chances, k) - 1) > OTHER_ACCEPTANCE:
            own = tokens / simulated(row, cost, conditional_acceptance(row["accepted_per_pos"], row["drafts"]))
            name = f"{regime}, k={k}, with the acceptance of these rollouts"
            yield Held("CPU", name, "for comparison", own, measured[key], unit="tok/s", note=note)


def simulated(row: Mapping[str, Any], cost: CostModel, chances: Sequence[float]) -> float:
    """Seconds of rollouts, the median of a few with other luck."""
    rollout = Workload(np.array(row["lengths"], dtype=float), row["prompt"], 1, 1, 64)
    draws = [simulate(rollout, cost, chances, row["k"], np.random.default_rng(seed)).seconds for seed in range(9)]
    return float(np.median(draws))


# ------------------------------------------------------------------------------------------------------ NVIDIA's 8B rows


def question_8b(workload: str, mean: float, acceptance: Mapping[int, float]) -> Question:
    """One workload; drafts stay as they are, so none is trained."""
    deployment = Deployment(find_model("Qwen3-8B").with_whole_head(), find_card("GB200"))
    lengths = lognormal(mean, LONGEST[workload])
    return Question(
        deployment, 32, BATCH, lengths, acceptance, tuple(acceptance), prompt=PROMPT, group=GROUP, draft_share=0.0
    )


def rows_8b(measured: Mapping[str, Any]) -> Iterator[Held]:
    """Rollouts for each k and draft, the step, and the step at lag 1."""
    workloads = {name: measured[name] for name in ("RL-Zero", "RL-Think")}
    tables = {name: {int(k): v for k, v in w["lengths_of_k"].items()} for name, w in workloads.items()}
    pinned, means = fit(tables, {name: w["plain"]["generation"] for name, w in workloads.items()})
    first = {name: mean_of(name, w["plain"]["generation"], {}) for name, w in workloads.items()}
    values = ", ".join(f"{name} {value:.3g}" for name, value in pinned.items())
    generation: dict[str, float] = {}
    for name, rows in tables.items():
        acceptance = {k: length for k, (length, _) in rows.items()}
        alone = answers(question_8b(name, first[name], acceptance), {}, DRAWS)
        fitted = answers(question_8b(name, means[name], acceptance), pinned, DRAWS)
        for k, (length, known) in rows.items():
            label, span = f"{name}, k={k}, {length:g} tokens a step", alone[k].rollout_speedup
            yield Held("8B", label, "predicted from sizes alone", span.typical, known, span.low, span.high)
        for k, (length, known) in rows.items():
            label, span = f"{name}, k={k}, {length:g} tokens a step", fitted[k].rollout_speedup
            how = "fitted" if (name, k) in FITTED else "predicted"
            note = values if how == "fitted" else WHY.get((name, k), "")
            yield Held("8B", label, how, span.typical, known, span.low, span.high, note=note)
        for draft, (length, known) in workloads[name]["other_drafts_k3"].items():
            span = answers(question_8b(name, means[name], {3: length}), pinned, DRAWS)[3].rollout_speedup
            label = f"{name}, k=3, draft {draft}, {length:g} tokens a step"
            yield Held("8B", label, "predicted", span.typical, known, span.low, span.high)
        plain, speedup = workloads[name]["plain"], fitted[3].rollout_speedup
        generation[name] = plain["generation"] / speedup.typical
        step = plain["step"] - plain["generation"] + generation[name]
        how = "from a fitted row" if (name, 3) in FITTED else "predicted"
        note = "plain stages as measured, generation as above"
        yield Held("8B", f"{name}, k=3, trainer step", how, step, workloads[name]["k=3"]["step"], unit="s", note=note)
    yield from rows_of_lag(measured["lag 1"], workloads, generation)


def rows_of_lag(
    lag: Mapping[str, Any], workloads: Mapping[str, Any], generation: Mapping[str, float]
) -> Iterator[Held]:
    """At lag 1 the plain row gives what the trainer takes; the flag's is predicted from it and from the synchronous speed-up."""
    name = lag["workload"]
    speedup = workloads[name]["plain"]["generation"] / generation[name]
    trainer = lag["plain"]["step"] - lag["plain"]["exposed"]
    rollouts = lag["plain"]["step"] / speedup  # whoever exposes generation is bound by it
    step, exposed = max(trainer, rollouts), max(0.0, rollouts - trainer)
    note = (
        f"trainer {trainer:.1f} s from the plain row; theirs fell to {lag['k=3']['step'] - lag['k=3']['exposed']:.1f} s"
    )
    yield Held("8B", f"{name}, lag 1, k=3, trainer step", "predicted", step, lag["k=3"]["step"], unit="s", note=note)
    saved, known = lag["plain"]["exposed"] - exposed, lag["plain"]["exposed"] - lag["k=3"]["exposed"]
    yield Held("8B", f"{name}, lag 1, k=3, exposed generation that is saved", "predicted", saved, known, unit="s")


def fit(
    tables: Mapping[str, Mapping[int, tuple[float, float]]], plain: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Constants by the fitted rows, mean lengths by the plain rollouts, twice in turn; on a grid that halves.

    Returns:
        Field of ``Constants`` -> value; workload -> mean tokens of a response.
    """
    point, pinned = (math.log(0.2), math.log(0.5e-3)), dict[str, float]()
    for width in (0.5, 0.2):
        means = {name: mean_of(name, seconds, pinned) for name, seconds in plain.items()}

        def loss(tried: tuple[float, ...], means: Mapping[str, float] = means) -> float:
            constants = dict(zip(FREE, map(math.exp, tried), strict=True))
            total = 0.0
            for name, k in FITTED:
                question = question_8b(name, means[name], {q: length for q, (length, _) in tables[name].items()})
                speedup = seconds_of(question, 0, constants) / seconds_of(question, k, constants)
                total += math.log(speedup / tables[name][k][1]) ** 2
            return total

        point = descend(loss, point, width)
        pinned = dict(zip(FREE, map(math.exp, point), strict=True))
    return pinned, {name: mean_of(name, seconds, pinned) for name, seconds in plain.items()}


def descend(
    loss: Callable[[tuple[float, ...]], float], point: tuple[float, float], width: float
) -> tuple[float, float]:
    """The least of a smooth function of two numbers, to about 0.05, by steps of ``width`` first."""
    value = loss(point)
    while width > 0.05:
        tries = [(point[0] + i * width, point[1] + j * width) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j]
        found = min((loss(tried), tried) for tried in tries)
        if found[0] < value:
            value, point = found
        else:
            width /= 2
    return point


def mean_of(workload: str, seconds: float, pinned: Mapping[str, float]) -> float:
    """The mean length with which plain rollouts take so long."""
    low, high = math.log(100), math.log(0.9 * LONGEST[workload])
    for _ in range(8):
        middle = (low + high) / 2
        took = seconds_of(question_8b(workload, math.exp(middle), {1: 1.5}), 0, pinned)
        low, high = (middle, high) if took < seconds else (low, middle)
    return math.exp((low + high) / 2)


def seconds_of(question: Question, k: int, pinned: Mapping[str, float]) -> float:
    """Of the rollouts with this k, for typical constants but these."""
    rng = np.random.default_rng(question.seed)
    lengths = question.lengths.drawn(question.batch * max(1, question.lag), rng)
    rollout = Workload(lengths, question.prompt, question.group, question.engines, max_running(question))
    cost = Roofline(question.deployment, Constants.typical().but(**pinned))
    return simulate(
        rollout, cost, chances_through(question.acceptance), k, np.random.default_rng(question.seed)
    ).seconds


def answers(question: Question, pinned: Mapping[str, float], draws: int) -> dict[int, ProjectedRow]:
    """The rows of a projection, by k; of engines that are not the flag's."""
    return {row.k: row for row in project(question, Overrides(pinned={"piecewise_s": 0.0, **pinned}), draws).rows}


# ------------------------------------------------------------------------------------------------------ their 235B


def rows_235b(rows: list[Mapping[str, Any]]) -> Iterator[Held]:
    """Rollouts from sizes alone; steps with the share of generation that their best draft's row implies."""
    best = next(row for row in rows if row["k"] is None)
    share = (1 - 1 / best["step"]) / (1 - 1 / best["rollout"])
    note = f"generation {share:.0%} of a plain step, from their best draft's {best['rollout']}x and {best['step']}x"
    yield Held("235B", f"{best['name']}, trainer step", "fitted", best["step"], best["step"], note=note)
    first: tuple[int, float] | None = None  # cards and plain seconds of the first row
    for row in rows:
        if row["k"] is None:
            continue
        label = f"{row['name']}, {row['acceptance']:g} tokens a step"
        split = min(SPLITS, key=lambda split: seconds_of(question_235b(row, split), row["k"], {}))
        found = answers(question_235b(row, split), {}, DRAWS)
        span, plain = found[row["k"]].rollout_speedup, found[0].rollout_s.typical / max(1, row["lag"])
        how = f"tp {split[0]}, ep {split[1]}; the range is of constants only"
        yield Held(
            "235B", f"{label}, rollouts", "predicted", span.typical, row["rollout"], span.low, span.high, note=how
        )
        other = answers(question_235b(row, RECIPE), {}, DRAWS)[row["k"]].rollout_speedup
        name = f"{label}, rollouts, tp {RECIPE[0]} as in NeMo RL's recipe"
        yield Held("235B", name, "for comparison", other.typical, row["rollout"], other.low, other.high)
        first = first or (row["gpus"], plain)
        scaled = plain / first[1] * row["gpus"] / first[0]
        here = share * scaled / (share * scaled + 1 - share)
        how = (
            note
            if scaled == 1
            else f"generation {here:.0%}: rollouts scale as simulated, the trainer with its cards, no overlap"
        )
        low, step, high = (1 / (1 - here + here / s) for s in (span.low, span.typical, span.high))
        yield Held("235B", f"{label}, trainer step", "predicted", step, row["step"], low, high, note=how)


def question_235b(row: Mapping[str, Any], split: tuple[int, int]) -> Question:
    """One row of their simulator, of 4096 responses in FP8; all cards generate, at a lag, too."""
    deployment = Deployment(find_model("Qwen3-235B-A22B").with_whole_head(), find_card("GB200"), *split, weight_bytes=1)
    return Question(
        deployment,
        row["gpus"],
        4096,
        lognormal(MEAN_235B, LONGEST_235B),
        {row["k"]: row["acceptance"]},
        (row["k"],),
        prompt=PROMPT,
        group=GROUP,
        lag=row["lag"],
        train_gpus=row["gpus"] if row["lag"] else None,
    )


# ------------------------------------------------------------------------------------------------------ report


def report(rows: list[Held]) -> None:
    """A table, and for each part how many predicted rows meet the goal."""
    from examples.bench.common import show

    body = [
        [f"{r.part}: {r.name}", r.how, _number(r.predicted), _range(r), _number(r.known), r.unit, _error(r)]
        for r in rows
    ]
    show("Predicted and known", ["row", "how", "predicted", "range", "known", "", "off"], body)
    for part, goal in GOALS.items():
        held = [r for r in rows if r.part == part and r.how == "predicted" and r.error is not None]
        met = [r for r in held if abs(r.error or 0.0) <= goal]
        click.echo(f"{part}: {len(met)} of {len(held)} predicted rows within {goal:.0%}")
        for row in held:
            if row not in met:
                click.echo(f"  {row.name}: {row.error:+.0%} {row.note}")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _range(row: Held) -> str:
    return "" if row.low is None else f"{row.low:.3g}-{row.high:.3g}"


def _error(row: Held) -> str:
    return "" if row.error is None else f"{row.error:+.0%}"


def write_picture(rows: list[Held], file: Path) -> None:
    """Predicted against known, one panel a part; the band is the goal."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    looks: dict[str, tuple[str, str]] = {"fitted": ("s", "gray"), "predicted": ("o", "tab:blue")}
    parts = [part for part in GOALS if any(r.part == part and r.unit == "x" for r in rows)]
    figure, panels = plt.subplots(
        1, len(parts), figsize=(4.6 * len(parts), 4.4), constrained_layout=True, squeeze=False
    )
    for panel, part in zip(panels[0], parts, strict=True):
        mine = [r for r in rows if r.part == part and r.unit == "x" and r.predicted is not None]
        for how in dict.fromkeys(r.how for r in mine):
            these = [r for r in mine if r.how == how]
            mark, colour = looks.get(how, ("x", "tab:orange"))
            panel.plot([r.known for r in these], [r.predicted for r in these], mark, color=colour, label=how)
        most = 1.1 * max(max(r.known, r.predicted or 0.0) for r in mine)
        line = np.array([0.0, most])
        panel.plot(line, line, color="gray", lw=0.8)
        panel.fill_between(line, line * (1 - GOALS[part]), line * (1 + GOALS[part]), color="gray", alpha=0.15)
        panel.set(title=f"{part}: speed-ups", xlabel="known", xlim=(0, most), ylim=(0, most))
        panel.legend(fontsize=8)
    panels[0][0].set_ylabel("projected")
    figure.savefig(file, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
