"""What a step of a mixture of experts costs, and whether the start-up's calibration knows it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from scipy.optimize import nnls

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from spec_plugin_conformance import tiny  # noqa: E402
from spec_plugin_projection.shapes import ModelShape, shape_of  # noqa: E402

from examples.bench import common, workload  # noqa: E402
from examples.bench.common import interleave, say, show, spread  # noqa: E402
from spec_plugin.api.events import StepTiming  # noqa: E402
from spec_plugin.step_cost.model import CostModel  # noqa: E402

if TYPE_CHECKING:
    from examples.bench.engines import Remote

HELP = """Time decoding steps of a mixture and of a dense policy with as many active parameters, in one run, in turn.

\b
1. How a plain step grows with its tokens, where they differ and where they are all the same, against two forms:
   a + d n, and a + c E(1 - (1 - top/E)^n) + d n, the experts that n tokens touch if routing is even.
2. The start-up's calibration (few prompts, over and over; batch sizes 1, 8 and all; k of 0, 1, 3 and --k) against
   steps of other batch sizes and k on text that it has not seen: how far off the cost model of the controller is.
"""

CALIBRATED = (1, 8)  # and the largest
UNSEEN = (2, 4, 16)
PROMPTS, LENGTH = 8, 16  # of the calibration: those of the self-test without a tokenizer


@dataclass(frozen=True)
class Form:
    """A fit of plain steps: seconds at each number of tokens, and the median and largest relative error."""

    terms: tuple[float, ...]
    median_error: float
    largest_error: float


@dataclass(frozen=True)
class Found:
    """The numbers of one policy."""

    policy: str
    plain: dict[int, float]  # seconds of a plain step by tokens, all different
    same: dict[int, float]  # and where they are the same
    linear: Form
    touched: Form
    verification: dict[int, float]  # step with k drafted tokens / plain step, at batch size 2
    predicted: dict[str, float]  # "batch,k" -> seconds, cells that the calibration has not seen
    measured: dict[str, float]
    error: float  # median of |predicted / measured - 1|
    largest_error: float
    chosen: dict[
        int, tuple[int, int]
    ]  # batch size -> k that the model finds best at --accept, and the best as measured
    regret: dict[int, float]  # speed of the first / speed of the second, as measured


@click.command(help=HELP, context_settings={"max_content_width": 120, "show_default": True})
@click.option("--experts", default=32, help="Experts of a layer.")
@click.option("--top", default=4, help="Experts that each token takes.")
@click.option("--units", default=512, help="Units of one expert.")
@click.option("--layers", default=8, help="Layers; 7 or more.")
@click.option("--k", default=8, help="Most tokens drafted per step.")
@click.option("--accept", default=0.8, help="Chance that a drafted token is accepted, for the choice of k.")
@click.option("--max-num-seqs", default=32, help="The engines' largest batch.")
@click.option("--steps", default=8, help="Steps of each measurement.")
@click.option("--rounds", default=3, help="Rounds that count; one more warms up.")
@click.option("--dtype", default="float32", help="Of both engines.")
@click.option("--threads", type=int, help="Compute threads; default: all cores.")
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of the JSON.")
def main(**options: Any) -> None:
    """Prepare, measure, report."""
    out = options.pop("out")
    common.prepare_process(options["threads"])
    targets = make_targets(options)
    from examples.bench.engines import EngineSettings, Remote  # slow to import

    settings = EngineSettings(dtype=options["dtype"], max_num_seqs=options["max_num_seqs"], max_model_len=256)
    say("starting two engines")
    engines = {
        name: Remote(
            options["threads"], "flag", target, settings, workload.newborn_draft(target, options["dtype"]), options["k"]
        ).wait()
        for name, target in targets.items()
    }
    found = [measure(name, engine, shape(targets[name]), options) for name, engine in engines.items()]
    for engine in engines.values():
        engine.close()
    report(found, options)
    common.write_results("moe-cost", options, found, common.environment("cpu"), out)


def make_targets(options: Mapping[str, Any]) -> dict[str, Path]:
    """Folders of a mixture, and of a dense policy whose MLP is as wide as what one token takes of it."""
    layers, units, top = options["layers"], options["units"], options["top"]
    made: dict[str, dict[str, Any]] = {
        "mixture": {
            "family": "qwen3_moe",
            "num_experts": options["experts"],
            "num_experts_per_tok": top,
            "moe_intermediate_size": units,
        },
        "dense": {"intermediate_size": top * units},
    }
    names = {name: "-".join(str(options[key]) for key in ("experts", "top", "units", "layers")) for name in made}
    return {
        name: tiny.make_target(workload.CACHE / f"moe-cost-{name}-{names[name]}", num_hidden_layers=layers, **changes)
        for name, changes in made.items()
    }


def shape(target: Path) -> ModelShape:
    """What a forward pass of it reads."""
    import json

    return shape_of(json.loads((target / "config.json").read_text()), target.name)


def texts(count: int, seed: int) -> list[list[int]]:
    """Prompts of random tokens, each of its own."""
    rng = random.Random(seed)
    return [[rng.randrange(3, tiny.VOCAB) for _ in range(LENGTH)] for _ in range(count)]


def measure(name: str, engine: Remote, model: ModelShape, options: Mapping[str, Any]) -> Found:
    """All of one policy."""
    full, k = options["max_num_seqs"], options["k"]
    asked = texts(PROMPTS, seed=0)
    few = [asked[i % PROMPTS] for i in range(full)]
    widths = tuple(dict.fromkeys((0, 1, min(3, k), k)))
    sizes = sorted({*UNSEEN, *CALIBRATED, full})
    cells: dict[str, Callable[[int], list[StepTiming]]] = {}
    for batch in sizes:
        for width in widths if batch in (*CALIBRATED, full) else ():
            cells[f"calibrate {batch},{width}"] = _cell(engine, lambda _, b=batch: few[:b], width, options)
        cells[f"same {batch},0"] = _cell(engine, lambda _, b=batch: [asked[0]] * b, 0, options, temperature=0.0)
        for width in dict.fromkeys((0, 1, 3, 5, k) if batch in UNSEEN else (0, 5)):
            cells[f"unseen {batch},{width}"] = _cell(engine, lambda r, b=batch: texts(b, 1000 * r + b), width, options)
    found = interleave(cells, options["rounds"], label=name)
    took = {cell: _seconds(rounds, cell) for cell, rounds in found.items()}
    cost = CostModel()
    cost.observe([t for cell, rounds in found.items() if cell.startswith("cal") for r in rounds for t in r], True)
    return judge(name, took, cost, model, options)


def judge(
    name: str, took: Mapping[str, float], cost: CostModel, model: ModelShape, options: Mapping[str, Any]
) -> Found:
    """What the times say."""
    of = {kind: _by_cell(took, kind) for kind in ("unseen", "same")}
    unseen = of["unseen"]
    plain = {b: s for (b, width), s in unseen.items() if width == 0}
    other = {cell: s for cell, s in unseen.items() if cell[0] in UNSEEN or cell[1] == 5}
    predicted = {(b, width): cost.seconds(b, width, paused=True) for b, width in other}
    errors = [abs(predicted[cell] / s - 1) for cell, s in other.items()]
    chosen, regret = {}, {}
    for batch in plain:
        ks = sorted(width for b, width in unseen if b == batch)
        seconds = {width: cost.seconds(batch, width) for width in ks}
        gain = [{w: _tokens(options["accept"], w) / of_all[w] for w in ks} for of_all in (seconds, _row(unseen, batch))]
        ours, best = (max(g, key=g.__getitem__) for g in gain)
        chosen[batch], regret[batch] = (ours, best), gain[1][ours] / gain[1][best]
    return Found(
        name,
        plain,
        {b: s for (b, _), s in of["same"].items()},
        _fit(plain, lambda n: (1.0, n)),
        _fit(plain, lambda n: (1.0, model.experts_touched(n), n)),
        {width: s / unseen[2, 0] for (b, width), s in unseen.items() if b == 2 and width},
        {f"{b},{w}": s for (b, w), s in predicted.items()},
        {f"{b},{w}": s for (b, w), s in other.items()},
        float(np.median(errors)),
        max(errors),
        chosen,
        regret,
    )


def _cell(
    engine: Remote,
    prompts: Callable[[int], list[list[int]]],
    k: int,
    options: Mapping[str, Any],
    temperature: float = 1.0,
) -> Callable[[int], list[StepTiming]]:
    def run(index: int) -> list[StepTiming]:
        engine.set_k(k)
        engine.take_steps()
        engine.run(prompts(index), temperature, options["steps"])
        return [s for s in engine.take_steps() if s.alike]

    return run


def _seconds(rounds: Sequence[Sequence[StepTiming]], cell: str) -> float:
    """Of a step with the whole batch: the median of the rounds."""
    batch, k = map(int, cell.split()[1].split(","))
    return spread([t.seconds for found in rounds for t in found if (t.batch, t.k) == (batch, k)]).median


def _by_cell(took: Mapping[str, float], kind: str) -> dict[tuple[int, int], float]:
    cells = {cell.split()[1]: s for cell, s in took.items() if cell.startswith(kind)}
    return {(int(c.split(",")[0]), int(c.split(",")[1])): s for c, s in cells.items()}


def _row(cells: Mapping[tuple[int, int], float], batch: int) -> dict[int, float]:
    return {width: s for (b, width), s in cells.items() if b == batch}


def _tokens(accept: float, k: int) -> float:
    return sum(accept**i for i in range(k + 1))


def _fit(plain: Mapping[int, float], terms: Callable[[float], tuple[float, ...]]) -> Form:
    """Least relative squares, no term negative."""
    rows, seconds = np.array([terms(n) for n in plain]), np.array(list(plain.values()))
    x, _ = nnls(rows / seconds[:, None], np.ones(len(seconds)))
    errors = np.abs(rows @ x / seconds - 1)
    return Form(tuple(map(float, x)), float(np.median(errors)), float(errors.max()))


def report(found: Sequence[Found], options: Mapping[str, Any]) -> None:
    """Tables."""
    sizes = sorted(found[0].plain)
    rows = [[f"{f.policy}, plain step, ms", *(f"{1e3 * f.plain[n]:.1f}" for n in sizes)] for f in found]
    rows += [[f"{f.policy}, all tokens the same", *(f"{1e3 * f.same[n]:.1f}" for n in sizes)] for f in found]
    show("A plain step by its tokens", ["", *map(str, sizes)], rows)
    widths = sorted(found[0].verification)
    rows = [[f.policy, *(f"{f.verification[k]:.2f}" for k in widths)] for f in found]
    show("A step with k drafted tokens in plain steps, batch size 2", ["", *map(str, widths)], rows)
    for title, form in (("a + d n", "linear"), ("a + c touched(n) + d n", "touched")):
        parts = [(f, getattr(f, form)) for f in found]
        said = "; ".join(f"{f.policy} {p.median_error:.1%}, at most {p.largest_error:.1%}" for f, p in parts)
        say(f"{title} is off by {said}")
    for f in found:
        off = f"{f.error:.1%}, at most {f.largest_error:.1%}"
        say(f"{f.policy}: where it has seen nothing, the calibration's model is off by {off}")
        ks = ", ".join(f"{b}: {a} ({best}, {f.regret[b]:.2f})" for b, (a, best) in sorted(f.chosen.items()))
        accepted = f"{options['accept']:.0%} accepted"
        say(f"{f.policy}, {accepted}; batch size: k by the model (best as measured, share of its speed): {ks}")


if __name__ == "__main__":
    main()
