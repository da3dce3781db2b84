"""Cost of the flag when speculation is off: the draft resident and the table of k all 0, against a plain engine."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from examples.bench import common, workload  # noqa: E402
from examples.bench.common import Spread, interleave, paired, say, show, spread  # noqa: E402

if TYPE_CHECKING:
    from examples.bench.engines import EngineSettings, Remote, Timing

HELP = """Measure what the flag costs while speculation is switched off.

\b
Law 7 says: never slower than off. Where speculation does not pay, the controller sets k to 0 for that batch size, but
the draft stays in the engine. This benchmark runs, in turn:
  plain   an engine that knows nothing of spec-plugin
  live    (CPU only) a plain engine whose weights can change, as a trainer needs it; see README.md
  off     an engine with the flag on and k=0: vLLM still runs the draft's first forward in every step, so that its KV
          cache follows and any later step may speculate
  paused  the same with that forward left out, as in a rollout phase in which no batch size speculates
on the padded target, where a step is mostly arithmetic, and on the unpadded one, where it is mostly overhead.
A ratio of 1.00 is free; 0.95 means 5 % fewer tokens per second.
"""


ARMS = ("plain", "live", "off", "paused")


@dataclass(frozen=True)
class Row:
    """The numbers of one target and batch size; ``live`` only on a CPU."""

    target: str
    batch: int
    rates: dict[str, Spread]  # arm -> tokens/s
    ratios: dict[str, Spread]  # arm -> its tokens/s over plain's, round by round
    step_ms: dict[str, Spread]  # arm -> a decoding step with the whole batch


@click.command(help=HELP, context_settings={"max_content_width": 120, "show_default": True})
@click.option("--target", type=click.Path(path_type=Path, exists=True), help="Folder of a dense Qwen3, Qwen2 or Llama.")
@click.option("--prompts", "file", type=click.Path(path_type=Path, exists=True), help="JSON list of texts.")
@click.option(
    "--width", "widths", multiple=True, type=int, default=(32768, 0), help="Units of the MLPs; 0: not padded."
)
@click.option("--k", default=3, help="What the engine is built for.")
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8, 32), help="Batch size; may be repeated.")
@click.option("--rounds", default=9, help="Rounds that count; one more warms up.")
@click.option("--tokens", default=48, help="Tokens per request.")
@click.option("--dtype", default="float32", help="Of both engines.")
@click.option("--device", default="auto", help="For preparation; engines use what their vLLM was built for.")
@click.option("--threads", type=int, help="Compute threads; default: all cores.")
@click.option("--cuda-graphs", is_flag=True, help="Do not force eager mode in the engines.")
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of the JSON file.")
def main(**options: Any) -> None:
    """Prepare, measure, report."""
    out, cuda_graphs = options.pop("out"), options.pop("cuda_graphs")
    common.prepare_process(options["threads"])
    device = common.pick_device(options["device"])
    target = options["target"] or workload.default_target()
    draft = workload.newborn_draft(target, options["dtype"])
    served = [workload.padded_target(target, w, options["dtype"]) for w in options["widths"]]

    from examples.bench.engines import EngineSettings  # slow to import

    settings = EngineSettings(dtype=options["dtype"], max_num_seqs=max(64, *options["batches"]), eager=not cuda_graphs)
    where = common.environment(device)
    rows = []
    for path in served:
        engines = start(path, draft, settings, options, device)
        name = f"{workload.parameters_of(path) / 1e6:.1f}M"
        rows += [measure(name, engines, b, target, options) for b in options["batches"]]
        for engine in set(engines.values()):
            engine.close()
    report([r["wall"] for r in rows], options)
    if where["threads"] == 1 and where["device"] == "cpu":
        say("the same rounds by CPU time: what an idle machine would show, with one thread")
        report([r["cpu"] for r in rows], options)
    content = {clock: [asdict(r[clock]) for r in rows] for clock in ("wall", "cpu")}
    common.write_results("off_cost", {**options, **asdict(settings)}, content, where, out)


def start(path: Path, draft: Path, settings: EngineSettings, options: dict[str, Any], device: str) -> dict[str, Remote]:
    """The arms' engines, each in its own process; ``off`` and ``paused`` are one."""
    from examples.bench.engines import Remote

    kinds = ("plain", "live", "flag") if device == "cpu" else ("plain", "flag")
    say(f"starting engines, each in its own process: {', '.join(kinds)}")
    begun = {kind: Remote(options["threads"], kind, path, settings, draft, options["k"]) for kind in kinds}
    engines = {kind: engine.wait() for kind, engine in begun.items()}
    flagged = engines.pop("flag")
    flagged.set_k(0)
    return engines | {"off": flagged, "paused": flagged}


def measure(name: str, engines: dict[str, Remote], batch: int, target: Path, options: dict[str, Any]) -> dict[str, Row]:
    """All arms at one batch size, in turn; the same rounds by either clock."""
    rounds = options["rounds"]
    prompts = workload.prompts_of(target, options["file"], batch * (rounds + 1), seed=2000 + batch)

    def arm(name: str, engine: Remote) -> Any:
        def run(index: int) -> Timing:
            if name in ("off", "paused"):
                engine.pause_draft(name == "paused")
            return engine.run(prompts[index * batch : (index + 1) * batch], 1.0, options["tokens"])

        return run

    label = f"{name}, batch {batch}: {', '.join(engines)} in turn"
    runs: dict[str, list[Timing]] = interleave({n: arm(n, e) for n, e in engines.items()}, rounds, 1, label)
    if any(t.drafts for t in runs["off"] + runs["paused"]):
        raise RuntimeError("the engine drafted although k is 0 for every batch size")
    return {clock: summarize(name, batch, runs, clock) for clock in ("wall", "cpu")}


def summarize(name: str, batch: int, runs: dict[str, list[Timing]], clock: str) -> Row:
    """The numbers of a batch size from all its rounds, by one clock: ``wall`` or ``cpu``."""
    rates = {arm: [t.rate(clock) for t in timings] for arm, timings in runs.items()}
    return Row(
        target=name,
        batch=batch,
        rates={arm: spread(values) for arm, values in rates.items()},
        ratios={arm: paired(values, rates["plain"]) for arm, values in rates.items() if arm != "plain"},
        step_ms={arm: spread([1e3 * t.step(clock) for t in timings]) for arm, timings in runs.items()},
    )


def report(rows: list[Row], options: dict[str, Any]) -> None:
    """Print the table."""
    arms = [arm for arm in ARMS if arm in rows[0].rates]
    head = ["target", "batch", *(f"{arm}\ntok/s" for arm in arms), *(f"{arm}\n/ plain" for arm in arms[1:])]
    head += [f"step ms\n{arm}" for arm in arms]
    body = []
    for r in rows:
        rates = [f"{r.rates[arm].median:.1f}" for arm in arms]
        ratios = [r.ratios[arm].text(".2f") for arm in arms[1:]]
        body.append([r.target, str(r.batch), *rates, *ratios, *(f"{r.step_ms[arm].median:.2f}" for arm in arms)])
    show(f"Cost of the flag with speculation off: {options['dtype']}. Medians (quartiles)", head, body)


if __name__ == "__main__":
    main()
