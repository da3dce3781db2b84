"""Break-even control: rollouts under the controller, under every fixed k, and plain, in easy and in adversarial regimes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from examples.bench import common, large, workload  # noqa: E402
from examples.bench.common import Spread, interleave, paired, say, show, spread, verdict  # noqa: E402
from examples.bench.speedup import prepare_draft  # noqa: E402
from examples.bench.steering import Steered, calibrate  # noqa: E402
from spec_plugin.api.events import SelfTestReport  # noqa: E402
from spec_plugin.step_cost.chances import constant_acceptance  # noqa: E402
from spec_plugin.step_cost.model import CostModel  # noqa: E402

if TYPE_CHECKING:
    from examples.bench.engines import Remote, Timing

HELP = """Measure that the controller is never slower than plain decoding, and how far it is from the best fixed k.

\b
Regimes, each for every --dtype:
  batch B          B requests of equal length
  tail             64 requests whose lengths differ: the batch drains from 64 to 1
  cold draft       an untrained draft that training praises all the same (acceptance length 3.5 predicted)
  sudden drift     the draft is good, and half-way through the rounds its weights are those of an untrained one
\b
Arms, in turn: live (a plain engine whose weights can change, which knows nothing of spec-plugin), then one engine with the
flag under k = 0 (draft paused), under each fixed k, and under the controller. The controller is the plugin's own. It sees
what it sees in a trainer: the step times of a short calibration, then those of its own rollouts, and the acceptance.
"""

#: every k that has an arm of its own, up to --k
FIXED = (0, 1, 2, 3, 4, 6, 8)
PLAIN_GOAL, REGRET_GOAL = 0.97, 0.95


@dataclass(frozen=True)
class Regime:
    """What one comparison generates."""

    name: str
    lengths: tuple[int, ...]  # tokens of each request of a round
    draft: str = "good"  # "good", "cold" or "drifts"
    promised: float = 3.8  # acceptance length at k=3 that training predicts for it


@dataclass(frozen=True)
class Cell:
    """The numbers of one regime and dtype."""

    regime: str
    dtype: str
    rates: dict[str, Spread]  # tokens/s of each arm
    against_plain: Spread  # controller / k=0 with the draft paused, round by round
    against_live: Spread
    against_best: Spread  # controller / the fixed k that was best in hindsight
    best: str
    acceptance: dict[str, float]  # acceptance length of each arm
    chosen: list[str]  # the controller's table, round by round; with a ! where the draft was dropped within the rollout
    predicted: dict[int, float]  # cost model, for the acceptance of that arm
    closed_form: dict[int, float]  # Leviathan et al., theorem 3.8
    realised: dict[int, Spread]  # k / k=0, decoding steps only


@click.command(help=HELP, context_settings={"max_content_width": 120, "show_default": True})
@click.option("--target", type=click.Path(path_type=Path, exists=True), help="Folder of a dense Qwen3, Qwen2 or Llama.")
@click.option("--prompts", "file", type=click.Path(path_type=Path, exists=True), help="JSON list of texts.")
@click.option("--draft", type=click.Path(path_type=Path, exists=True), help="Folder of a draft: nothing is trained.")
@click.option(
    "--shape",
    type=click.Choice(list(large.SHAPES)),
    help="Embed the small policy exactly in a large shape (8b: Qwen3-8B's) instead of padding it; for a GPU.",
)
@click.option("--width", default=32768, help="Units of the padded MLPs (32768: 101M parameters); 0: not padded.")
@click.option("--k", default=8, help="Most tokens drafted per step.")
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 4, 8, 32), help="Batch size; may be repeated.")
@click.option("--dtype", "dtypes", multiple=True, default=("float32", "bfloat16"), help="Of both engines.")
@click.option("--rounds", default=6, help="Rounds that count; one more warms up.")
@click.option("--tokens", default=48, help="Tokens per request.")
@click.option("--temperature", default=1.0, help="Of the rollouts.")
@click.option("--rollouts", default=500, help="Rollouts that the draft is trained on.")
@click.option("--train-steps", default=300, help="Optimizer steps of draft training.")
@click.option("--device", default="auto", help="For sampling and training.")
@click.option("--threads", type=int, help="Compute threads; default: all cores.")
@click.option("--only", default="", help="Only regimes whose name contains this.")
@click.option("--cuda-graphs", is_flag=True, help="Do not force eager mode in the engines.")
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of JSON and PNG.")
def main(**options: Any) -> None:
    """Prepare, measure, report."""
    out, cuda_graphs = options.pop("out"), options.pop("cuda_graphs")
    common.prepare_process(options["threads"])
    device = common.pick_device(options["device"])
    small = target = options["target"] or workload.default_target()
    trained = draft = prepare_draft(small, {**options, "dtype": "float32"}, device)
    cells: list[Cell] = []
    for dtype in options["dtypes"]:
        if options["shape"] is not None:
            target = large.embedded_target(small, large.SHAPES[options["shape"]], dtype)
            draft = large.embedded_draft(trained, small, target, dtype)
        found = measure_dtype(target, draft, dtype, not cuda_graphs, options)
        report(found)
        cells += found
    where = common.environment(device)
    file = common.write_results("control", {**options, "target": target}, [asdict(c) for c in cells], where, out)
    write_picture(cells, file.with_suffix(".png"))
    say(f"picture: {file.with_suffix('.png')}")


def regimes(options: dict[str, Any]) -> list[Regime]:
    """Those that were asked for."""
    rng, tokens = random.Random(0), options["tokens"]
    tail = tuple(min(4 * tokens, 8 + int(rng.expovariate(1.5 / tokens))) for _ in range(64))
    found = [Regime(f"batch {b}", (tokens,) * b) for b in options["batches"]]
    found += [Regime("tail", tail), Regime("cold draft", (tokens,) * 8, "cold", 3.5)]
    found += [Regime("sudden drift", (tokens,) * 4, "drifts")]
    return [r for r in found if options["only"] in r.name]


def measure_dtype(target: Path, draft: Path, dtype: str, eager: bool, options: dict[str, Any]) -> list[Cell]:
    """Every regime, on two engines."""
    served = target if options["shape"] else workload.padded_target(target, options["width"], dtype)
    newborn = workload.newborn_draft(target, dtype)

    from examples.bench.engines import EngineSettings, Kind, Remote  # slow to import

    settings = EngineSettings(dtype=dtype, max_num_seqs=max(64, *options["batches"]), eager=eager)
    say(f"starting two engines in {dtype}")
    kinds: tuple[Kind, Kind] = ("plain" if common.pick_device(options["device"]) == "cuda" else "live", "flag")
    # one after the other: each measures how much of a card's memory is free
    live, flag = (Remote(options["threads"], kind, served, settings, draft, options["k"]).wait() for kind in kinds)
    sizes = sorted({1, 8, 32, 64, *options["batches"]})
    calibration = calibrate(flag, workload.prompts_of(target, options["file"], sizes[-1], seed=5), sizes, options["k"])
    cells = []
    for regime in regimes(options):
        bench = Bench(regime, dtype, live, flag, target, {"good": draft, "cold": newborn}, calibration, options)
        cells.append(bench.measure())
        report(cells[-1:])  # a run that is ended leaves what it has measured
    for engine in (live, flag):
        engine.close()
    return cells


def closed_form_speedup(alpha: float, k: int, draft_cost: float) -> float:
    """Leviathan et al., arXiv 2211.17192, theorem 3.8: (1 - alpha^(k+1)) / ((1 - alpha)(k c + 1)).

    Args:
        alpha: chance that a drafted token is accepted, the same at every position.
        k: drafted tokens (their gamma).
        draft_cost: seconds of a draft forward / seconds of a target forward (their c), whatever the number of tokens.
    """
    tokens = k + 1.0 if alpha == 1.0 else (1 - alpha ** (k + 1)) / (1 - alpha)
    return tokens / (k * draft_cost + 1)


class Bench:
    """All arms of one regime."""

    def __init__(
        self,
        regime: Regime,
        dtype: str,
        live: Remote,
        flag: Remote,
        target: Path,
        drafts: dict[str, Path],
        calibration: SelfTestReport,
        options: dict[str, Any],
    ) -> None:
        self.regime, self.dtype, self.live, self.flag = regime, dtype, live, flag
        self.drafts, self.options, self.k = drafts, options, options["k"]
        count = len(regime.lengths)
        self.prompts = workload.prompts_of(target, options["file"], count * (options["rounds"] + 1), seed=99)
        promised = (constant_acceptance(regime.promised, 3),) * self.k
        seats = max(64, *options["batches"])
        self.steered = Steered(flag, calibration, promised, k=self.k, max_num_seqs=seats, dtype=dtype)
        self.everything = CostModel()  # what a cost model predicts that has seen the steps of every arm
        self.serving = ""

    def measure(self) -> Cell:
        """Every arm in every round."""
        arms: dict[str, Callable[[int], Timing]] = {"live": partial(self._run, self.live)}
        arms |= {f"k={k}": partial(self._fixed, k) for k in FIXED if k <= self.k}
        arms["controller"] = self._controlled
        label = f"{self.dtype}, {self.regime.name}: {', '.join(arms)} in turn"
        return self._cell(interleave(arms, self.options["rounds"], 1, label))

    def _run(self, engine: Remote, index: int) -> Timing:
        self._serve(index)
        return engine.run(self._asked(index), self.options["temperature"], self.regime.lengths)

    def _asked(self, index: int) -> workload.Prompts:
        count = len(self.regime.lengths)
        return self.prompts[index * count : (index + 1) * count]

    def _serve(self, index: int) -> None:
        """Install the draft of this round."""
        drifted = self.regime.draft == "drifts" and index > self.options["rounds"] // 2
        wanted = "cold" if self.regime.draft == "cold" or drifted else "good"
        if wanted != self.serving:
            self.serving = wanted
            (file,) = self.drafts[wanted].glob("*.safetensors")
            self.flag.install(file, version=random.randrange(1, 1 << 60))

    def _fixed(self, k: int, index: int) -> Timing:
        self.flag.set_k(k)
        timing = self._run(self.flag, index)
        self.everything.observe(self.flag.take_steps())
        return timing

    def _controlled(self, index: int) -> Timing:
        self._serve(index)
        return self.steered.run(index, self._asked(index), self.options["temperature"], self.regime.lengths)

    def _cell(self, runs: dict[str, list[Timing]]) -> Cell:
        rates = {name: [t.rate("wall") for t in timings] for name, timings in runs.items()}
        fixed = {name: rates[name] for name in rates if name.startswith("k=")}
        best = max(fixed, key=lambda name: spread(fixed[name]).median)
        lengths = {name: _acceptance(timings) for name, timings in runs.items()}
        batch = len(self.regime.lengths)
        steps = {k: [t.step("wall") for t in runs[f"k={k}"]] for k in FIXED if k <= self.k}
        cost, median = self.everything, {k: spread(s).median for k, s in steps.items()}
        predicted, closed, realised = {}, {}, {}
        for k in (k for k in FIXED if 0 < k <= self.k):
            alpha = constant_acceptance(lengths[f"k={k}"], k)
            predicted[k] = lengths[f"k={k}"] * cost.seconds(batch, 0) / cost.seconds(batch, k)
            closed[k] = closed_form_speedup(alpha, k, max(0.0, median[k] / median[0] - 1) / k)
            tokens = [1 + t.accepted / max(1, t.drafts) for t in runs[f"k={k}"]]
            pairs = zip(tokens, steps[0], steps[k], strict=True)
            realised[k] = spread([n * plain / speculating for n, plain, speculating in pairs])
        return Cell(
            regime=self.regime.name,
            dtype=self.dtype,
            rates={name: spread(values) for name, values in rates.items()},
            against_plain=paired(rates["controller"], rates["k=0"]),
            against_live=paired(rates["controller"], rates["live"]),
            against_best=paired(rates["controller"], fixed[best]),
            best=best,
            acceptance=lengths,
            chosen=self.steered.chosen,
            predicted=predicted,
            closed_form=closed,
            realised=realised,
        )


def _acceptance(timings: Sequence[Timing]) -> float:
    drafts = sum(t.drafts for t in timings)
    return 1 + sum(t.accepted for t in timings) / drafts if drafts else 1.0


def report(cells: list[Cell]) -> None:
    """Print both tables."""
    arms = [name for name in cells[0].rates if name != "controller"]
    head = [
        "dtype, regime",
        *(f"{a}\ntok/s" for a in arms),
        "controller\ntok/s",
        "/ plain",
        "/ live",
        "/ best k",
        "chosen",
    ]
    body = []
    for c in cells:
        goals = [
            verdict(c.against_plain.median >= PLAIN_GOAL, c.against_plain.text(".2f")),
            c.against_live.text(".2f"),
            verdict(c.against_best.median >= REGRET_GOAL, f"{c.best} {c.against_best.text('.2f')}"),
        ]
        rates = [f"{c.rates[a].median:.0f}" for a in (*arms, "controller")]
        body.append([f"{c.dtype}, {c.regime}", *rates, *goals, " ".join(c.chosen[-6:])])
    show(
        f"Tokens per second; the controller against plain decoding (goal {PLAIN_GOAL}) and the best fixed k (goal "
        f"{REGRET_GOAL}). Medians (quartiles); chosen: k at batch size 1/half/all, round by round (!: dropped within the "
        "rollout)",
        head,
        body,
    )
    rows = []
    for c in cells:
        for k, realised in c.realised.items():
            off = max(abs(c.predicted[k] / realised.median - 1), abs(c.closed_form[k] / realised.median - 1))
            numbers = [f"{c.acceptance[f'k={k}']:.2f}", f"{c.closed_form[k]:.2f}", f"{c.predicted[k]:.2f}"]
            rows.append([f"{c.dtype}, {c.regime}", str(k), *numbers, realised.text(".2f"), f"{off:.0%}"])
    title = "Decoding speed-up, predicted and realised"
    columns = ["dtype, regime", "k", "acceptance\nlength", "closed\nform", "cost\nmodel", "realised", "apart"]
    show(title, columns, rows)


def write_picture(cells: list[Cell], file: Path) -> None:
    """A group of bars for each cell: every arm's tokens per second, k=0 being 1."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    arms = [a for a in cells[0].rates if a != "live"]
    figure, axes = plt.subplots(figsize=(1.2 + 1.1 * len(cells), 4.5), constrained_layout=True)
    width = 0.8 / len(arms)
    for i, arm in enumerate(arms):
        plain = [c.rates["k=0"].median for c in cells]
        heights = [c.rates[arm].median / p for c, p in zip(cells, plain, strict=True)]
        low = [(c.rates[arm].median - c.rates[arm].low) / p for c, p in zip(cells, plain, strict=True)]
        high = [(c.rates[arm].high - c.rates[arm].median) / p for c, p in zip(cells, plain, strict=True)]
        colour = "black" if arm == "controller" else plt.get_cmap("Blues")(0.25 + 0.6 * i / len(arms))
        places = [x + (i - (len(arms) - 1) / 2) * width for x in range(len(cells))]
        axes.bar(
            places, heights, width, label=arm, color=colour, yerr=(low, high), error_kw={"lw": 0.8, "ecolor": "gray"}
        )
    axes.axhline(1.0, color="gray", lw=0.8, ls=":")
    axes.set_xticks(range(len(cells)), [f"{c.regime}\n{c.dtype}" for c in cells], fontsize=8)
    axes.set_ylabel("rollout speed (k=0: 1)")
    axes.set_title("The controller against every fixed k")
    axes.legend(ncols=len(arms), fontsize=8)
    figure.savefig(file, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
