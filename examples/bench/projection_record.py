"""Every number that was measured on a card, beside what ``spec-plugin project`` and the doctor's count say of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from spec_plugin_projection.constants import Constants  # noqa: E402
from spec_plugin_projection.hardware import CARDS  # noqa: E402
from spec_plugin_projection.projecting import DRAWS, Estimate, chances_through  # noqa: E402
from spec_plugin_projection.rollout import Workload, simulate  # noqa: E402
from spec_plugin_projection.roofline import Deployment, Roofline  # noqa: E402
from spec_plugin_projection.shapes import find_model  # noqa: E402

from draft_training import DraftConfig, TrainSettings, training_memory  # noqa: E402
from examples.bench.large import SHAPES  # noqa: E402
from spec_plugin.policy.break_even.plan import best  # noqa: E402

HELP = """Print every number that card.py measured on a GPU beside what is predicted of it, as Markdown.

FILES are card.py's results, of any card that `spec-plugin project` knows; default: all in examples/bench/results. Their table is
docs/reference/projection-record.md.
"""
RESULTS = Path(__file__).parent / "results"
#: the shape of card.py's policy as a model of ``spec-plugin project``
MODELS = {"8b": "Qwen3-8B"}
#: of card.py's requests: tokens of a prompt, about; of a response; what a decoding step of them has in the KV cache
PROMPT, TOKENS, CONTEXT = 16, 48, 16 + 24
#: vLLM's largest CUDA graph, in tokens
GRAPH_TOKENS = 512
#: bytes of the KV cache that card.py's ``start`` gives each engine
KV_CACHE = 3 << 30
#: until then the policy's embedding lay on the card while a draft was trained
EMBEDDING_ON_CARD = "2026-11-27"
#: the rows by which constants were chosen; all others are predicted
FITTED = ("ms of a step", "0.26.0")
FAR = 0.25
_SKEWED = (
    "products_reached and draft_pass_s range far for other systems' sake, which lifts the median of the draws; by typical "
    "constants it is 1.1"
)
_STALLED = "the host stalled in these 11 steps: 32 requests of the same start-up took {} as long"
_SINGLE = "one step, of a batch that was ending"
#: setting -> why its row stays off by more than ``FAR``: no constant can be right for it and for its neighbours
WHY: dict[str, str] = {
    "ms of a step, 0.26.0 batch 32, k=7, full graphs": _SKEWED,
    "ms of a step, 0.26.0 batch 8, k=7, full graphs": _SKEWED,
    "ms of a step, 0.26.0 batch 128, k=3": _SKEWED,
    "tokens/s, 0.26.0 batch 8, k=3": "the rounds took half as long again as their steps, by the median, say: the host stalled",
    "ms of a step, 0.24.0 start-up, batch 1, k=0, 11 steps": _STALLED.format("0.6 times"),
    "ms of a step, 0.24.0 start-up, batch 8, k=0, 11 steps": _STALLED.format("half"),
    "ms of a step, 0.24.0 start-up, batch 8, k=1, 11 steps": _STALLED.format("half"),
    "ms of a step, 0.24.0 start-up, batch 8, k=3, 11 steps": _STALLED.format("half"),
    "ms of a step, 0.24.0 start-up, batch 39, k=1, 1 step": _SINGLE,
    "ms of a step, 0.24.0 start-up, batch 134, k=3, 1 step": _SINGLE,
    "tokens/s, 0.24.0 batch 16, mediocre draft, k=1": "its steps took 1.35 times those of the good draft with the same k",
    "tokens/s, 0.24.0 batch 16, mediocre draft, k by batch size": "slower than k=2 and k=3 beside it, of which it is made",
}


@dataclass(frozen=True)
class Arm:
    """An engine, and what it does."""

    batch: int
    k: int | None = 0  # None: by batch size
    flag: bool = True
    full_graphs: bool = False
    paused: bool = True  # with k = 0, is the draft's pass left out


@dataclass(frozen=True)
class Row:
    """A number as it was measured, and as it is predicted."""

    what: str
    setting: str  # vLLM's version first, if it is of an engine
    measured: Mapping[str, float]  # median, and low and high quartile where there were rounds
    predicted: Estimate | None
    how: str = "predicted"
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Predicted / measured."""
        return None if self.predicted is None else self.predicted.typical / self.measured["median"]

    @property
    def far(self) -> bool:
        """Is it off by more than ``FAR``, either way."""
        return self.ratio is not None and abs(self.ratio - 1) > FAR

    @property
    def inside(self) -> bool:
        """Does what was measured lie in the range of the prediction."""
        return self.predicted is not None and self.predicted.low <= self.measured["median"] <= self.predicted.high


@click.command(help=HELP)
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True))
def main(files: tuple[Path, ...]) -> None:
    """Read, predict, print."""
    click.echo(markdown(rows_of(files)), nl=False)


def rows_of(files: Sequence[Path] = ()) -> list[Row]:
    """All rows of these results, or of all that are in the repository."""
    contents = [json.loads(file.read_text()) for file in files or sorted(RESULTS.glob("card-*.json"))]
    return [row for content in contents for part in content["parts"] for row in _rows_of_part(part)]


def _rows_of_part(part: Mapping[str, Any]) -> Iterator[Row]:
    settings, environment = part["settings"], part["environment"]
    name = next((name for name in CARDS if name in (environment["card"] or "").split()), None)
    if name is None or settings["shape"] not in MODELS:
        return
    deployment = Deployment(find_model(MODELS[settings["shape"]]).with_whole_head(), CARDS[name])
    version = environment["versions"].get("vllm", "")
    for row in part["rows"]:
        of_kind = _KINDS.get(row["kind"])
        for found in of_kind(deployment, row, part) if of_kind else ():
            how = "not predicted" if found.predicted is None else found.how
            how = "fitted" if (found.what, version) == FITTED else how
            setting = f"{version} {found.setting}" if version else found.setting
            yield replace(found, setting=setting, how=how, note=found.note or WHY.get(f"{found.what}, {setting}", ""))


# ------------------------------------------------------------------------------------------------------ kinds of rows


def _steps(deployment: Deployment, row: Mapping[str, Any], part: Mapping[str, Any]) -> Iterator[Row]:
    """Milliseconds of a decoding step, and tokens per second of the same rounds with their prefill."""
    name, batch = row["arm"], row["batch"]
    k = int(name.rpartition("k=")[2]) if "k=" in name else 0
    # on V1 full graphs are captured for the largest k alone
    widest = max(int(other["arm"].rpartition("k=")[2]) for other in part["rows"] if "k=" in other.get("arm", ""))
    full = "full graphs" in name and k == widest and batch * (k + 1) <= GRAPH_TOKENS
    arm = Arm(batch, k, name != "off", full)
    setting = f"batch {batch}, {f'k={k}' if arm.flag else 'without the flag'}{', full graphs' if full else ''}"
    yield Row("ms of a step", setting, row["ms"], step_ms(deployment, arm, CONTEXT))
    accepted = {k: row["tokens_per_step"]} if k else {}
    yield Row("tokens/s", setting, row["tokens_per_second"], rate(deployment, arm, accepted))


def _calibration(deployment: Deployment, row: Mapping[str, Any], _part: Mapping[str, Any]) -> Iterator[Row]:
    """Milliseconds of a step of the start-up's calibration."""
    arm = Arm(row["batch"], row["k"], paused=row["paused"])
    reading = ", draft reading" if arm.k == 0 and not arm.paused else ""
    setting = f"start-up, batch {arm.batch}, k={arm.k}{reading}, {row['steps']} step{'s' * (row['steps'] > 1)}"
    yield Row("ms of a step", setting, {"median": 1e3 * row["seconds"]}, step_ms(deployment, arm, row["context"]))


def _rollouts(deployment: Deployment, row: Mapping[str, Any], _part: Mapping[str, Any]) -> Iterator[Row]:
    """Tokens per second of rollouts: without the flag, with each k, and under the controller."""
    batch = int(row["regime"].removeprefix("batch ").partition(",")[0])
    draft, accepted = "mediocre" if "mediocre" in row["regime"] else "good", row["acceptance"]
    for name, measured in row["rates"].items():
        arm = (
            Arm(batch, 0, flag=False) if name == "live" else Arm(batch, None if name == "controller" else int(name[2:]))
        )
        known = {k: accepted[f"k={k}"] for k in ((1, row["k"]) if arm.k is None else (arm.k,)) if k}
        how = {"live": "without the flag", "controller": "k by batch size"}.get(name, name)
        yield Row("tokens/s", f"batch {batch}, {draft} draft, {how}", measured, rate(deployment, arm, known))


def _engine(deployment: Deployment, row: Mapping[str, Any], _part: Mapping[str, Any]) -> Iterator[Row]:
    """Memory of an engine: weights, the draft's included, and KV cache."""
    model = deployment.model
    draft = 0.0 if row["engine"] == "off" else deployment.weight_bytes * model.draft_parameters
    mib = (deployment.weight_bytes * model.parameters + draft + KV_CACHE) / 2**20
    setting = "without the flag" if row["engine"] == "off" else "with the flag"
    yield Row("MiB of an engine", setting, {"median": row["memory_mib"]["now"]}, Estimate(mib, mib, mib))
    yield Row("s to start an engine", setting, {"median": row["seconds_to_start"]}, None, note="nothing counts a start")


def _training(_deployment: Deployment, row: Mapping[str, Any], part: Mapping[str, Any]) -> Iterator[Row]:
    """One optimizer step of a draft: its seconds, which nothing predicts, and its memory, which the doctor counts in float32."""
    setting = f"draft training, {row['tokens']} tokens, {row['precision']}"
    share = "project gives draft training its share of a step (train_share), whatever it is done with"
    yield Row("s of an optimizer step", setting, row["seconds"], None, note=share)
    hf = {"model_type": "qwen3", "max_position_embeddings": 40960, "tie_word_embeddings": False}
    config = DraftConfig.from_target(hf | asdict(SHAPES[part["settings"]["shape"]]))
    on_card = part["environment"]["date"] >= EMBEDDING_ON_CARD
    count = training_memory(config, row["tokens"], TrainSettings.first_steps, 2, False, on_card=on_card)
    counted = {"between_steps_mib": count.weights + count.slices, "peak_mib": count.peak}
    for name, size in counted.items():
        predicted = None if row["precision"] == "bfloat16" else Estimate(*[size / 2**20] * 3)
        what = {"between_steps_mib": "MiB between optimizer steps", "peak_mib": "MiB at the most"}[name]
        none = "no run trains in it" if predicted is None else ""
        yield Row(what, setting, {"median": row[name] - row["before_mib"]}, predicted, note=none)


_KINDS = {
    "step": _steps,
    "calibration": _calibration,
    "rollouts": _rollouts,
    "engine": _engine,
    "training": _training,
}


# ------------------------------------------------------------------------------------------------------ predictions


@cache
def _constants() -> tuple[Constants, ...]:
    return (Constants.typical(), *Constants.draws(DRAWS, Random(0)))


def _costs(deployment: Deployment, arm: Arm) -> Iterator[Roofline]:
    for constants in _constants():
        yield Roofline(deployment, constants.with_the_flag(arm.full_graphs) if arm.flag else constants, CONTEXT)


def step_ms(deployment: Deployment, arm: Arm, context: float) -> Estimate:
    """Milliseconds of one decoding step."""
    return Estimate.of(
        [1e3 * cost.seconds(arm.batch, arm.k or 0, arm.paused, context) for cost in _costs(deployment, arm)]
    )


def rate(deployment: Deployment, arm: Arm, acceptance: Mapping[int, float]) -> Estimate:
    """Tokens per second of one round of card.py's requests.

    Args:
        deployment: of the engine.
        arm: what it does.
        acceptance: k -> tokens a step, as measured.
    """
    chances = chances_through(acceptance)
    work = Workload(np.full(arm.batch, float(TOKENS)), PROMPT, 1, 1, arm.batch)
    rates = []
    for seed, cost in enumerate(_costs(deployment, arm)):
        table: tuple[int, ...] = (arm.k or 0,)
        if arm.k is None:
            load = {float(arm.batch): float(arm.batch * TOKENS)}
            table = best(cost, chances, load, (0,) * (arm.batch + 1), range(max(acceptance) + 1)).table
        seconds = simulate(work, cost, chances, table, np.random.default_rng(seed)).seconds
        rates.append(arm.batch * TOKENS / seconds)
    return Estimate.of(rates)


# ------------------------------------------------------------------------------------------------------ the table


def markdown(rows: Sequence[Row]) -> str:
    """The table, and how many rows are how far off."""
    head = [
        "what",
        "vLLM, setting",
        "measured",
        "predicted",
        "predicted / measured",
        "how",
        "why it is off, or not predicted",
    ]
    lines = [head, ["---"] * len(head)]
    lines += [
        [
            *(row.what, row.setting, _measured(row.measured), _predicted(row.predicted)),
            *("–" if row.ratio is None else f"{row.ratio:.2f}", row.how, row.note),
        ]
        for row in rows
    ]
    counts = [
        f"{name.capitalize()}: {_counted([row for row in rows if row.how == name])}" for name in ("predicted", "fitted")
    ]
    return "\n\n".join(["\n".join(f"| {' | '.join(cells)} |" for cells in lines), ". ".join(counts) + "."]) + "\n"


def _counted(rows: Sequence[Row]) -> str:
    near, close = (sum(abs((row.ratio or 0.0) - 1) <= most for row in rows) for most in (0.1, FAR))
    ranged = [row for row in rows if row.predicted and row.predicted.low < row.predicted.high]
    inside = f"{sum(row.inside for row in ranged)} of {len(ranged)} in their range"
    return f"of {len(rows)} rows {near} within 10 %, {close} within 25 %, {len(rows) - close} not; {inside}"


def _measured(spread: Mapping[str, float]) -> str:
    quartiles = f" ({_number(spread['low'])}-{_number(spread['high'])})" if "low" in spread else ""
    return _number(spread["median"]) + quartiles


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _predicted(span: Estimate | None) -> str:
    if span is None:
        return "–"
    return _measured({"median": span.typical, **({"low": span.low, "high": span.high} if span.low < span.high else {})})


if __name__ == "__main__":
    main()
