"""Rollout speed-up: an engine with a trained draft against a plain engine, and against itself with k=0."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from examples.bench import common, workload  # noqa: E402
from examples.bench.common import Spread, interleave, limit, paired, say, show, spread, verdict  # noqa: E402

if TYPE_CHECKING:
    from examples.bench.engines import Remote, Timing

HELP = """Measure how much faster rollouts are with a trained EAGLE-3 draft.

\b
What happens:
  1. A small policy is built (or yours is taken: --target), and its MLPs are padded with units that change no output,
     so that its forward pass costs what a larger model's does (--width; 0 leaves it as it is).
  2. The unpadded policy rolls out, a forward pass over these rollouts is harvested, and our own training loop trains a
     draft on it. Policy and draft are cached under .cache/bench.
  3. These arms generate the same number of tokens for the same prompts, in turn:
       plain   an engine that knows nothing of spec-plugin
       live    (CPU only) a plain engine whose weights can change, as a trainer needs it; see README.md
       draft   an engine with the flag on, speculating
       k=0     the same engine, its table of k set to 0
  4. A table shows tokens per second, the speed-up, and the limit that acceptance length and step cost allow:
       limit = acceptance length / (seconds of a verification step / seconds of a plain step).
     A second table shows where the rest of the limit went.

Your own model: --target DIR --prompts FILE, a JSON file with a list of texts; on a GPU with --width 0 --dtype bfloat16.
"""

#: what this benchmark is expected to reach with its default settings, by batch size
GOALS = {1: 5.0, 8: 1.6}


@dataclass(frozen=True)
class Row:
    """The numbers of one batch size."""

    batch: int
    plain: Spread  # tokens/s
    draft: Spread
    off: Spread
    live: Spread | None  # a plain engine whose weights can change; None where that is every engine
    speedup: Spread  # draft / plain, round by round
    against_live: Spread | None
    against_off: Spread
    acceptance_length: float
    plain_step_ms: Spread
    live_step_ms: Spread | None
    draft_step_ms: Spread
    off_step_ms: Spread
    plain_prefill_ms: Spread
    draft_prefill_ms: Spread
    plain_steps: Spread  # decoding steps until the last request was done
    draft_steps: Spread
    break_even: Spread

    @property
    def limit(self) -> float:
        """See ``common.limit``."""
        return limit(self.acceptance_length, self.break_even.median)

    @property
    def goal(self) -> float | None:
        """What is expected of the default settings."""
        return GOALS.get(self.batch)


@click.command(help=HELP, context_settings={"max_content_width": 120, "show_default": True})
@click.option("--target", type=click.Path(path_type=Path, exists=True), help="Folder of a dense Qwen3, Qwen2 or Llama.")
@click.option("--prompts", "file", type=click.Path(path_type=Path, exists=True), help="JSON list of texts.")
@click.option("--draft", type=click.Path(path_type=Path, exists=True), help="Folder of a draft: nothing is trained.")
@click.option("--width", default=32768, help="Units of the padded MLPs (32768: 101M parameters); 0: not padded.")
@click.option("--k", default=8, help="Tokens drafted per step.")
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8), help="Batch size; may be repeated.")
@click.option("--rounds", default=9, help="Rounds that count; one more warms up.")
@click.option("--tokens", default=48, help="Tokens per request, the same in every arm; the end token is ignored.")
@click.option("--temperature", default=1.0, help="Of the rollouts and of the measurement.")
@click.option("--rollouts", default=500, help="Rollouts that the draft is trained on.")
@click.option("--train-steps", default=300, help="Optimizer steps of draft training.")
@click.option("--dtype", default="float32", help="Of both engines. float32 on CPUs without AMX.")
@click.option("--device", default="auto", help="For sampling and training; engines use what their vLLM was built for.")
@click.option("--threads", type=int, help="Compute threads; default: all cores.")
@click.option("--cuda-graphs", is_flag=True, help="Do not force eager mode in the engines.")
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of the JSON file.")
def main(**options: Any) -> None:
    """Prepare, measure, report."""
    out, cuda_graphs = options.pop("out"), options.pop("cuda_graphs")
    common.prepare_process(options["threads"])
    device = common.pick_device(options["device"])
    target = options["target"] or workload.default_target()
    draft = prepare_draft(target, options, device)
    served = workload.padded_target(target, options["width"], options["dtype"])
    shares = {"target": workload.parameters_of(served), "draft": workload.parameters_of(draft)}

    from examples.bench.engines import EngineSettings, Remote  # slow to import

    settings = EngineSettings(dtype=options["dtype"], max_num_seqs=max(64, *options["batches"]), eager=not cuda_graphs)
    kinds = ("plain", "live", "flag") if device == "cpu" else ("plain", "flag")
    say(f"starting engines, each in its own process: {', '.join(kinds)}")
    begun = {kind: Remote(options["threads"], kind, served, settings, draft, options["k"]) for kind in kinds}
    engines = {kind: engine.wait() for kind, engine in begun.items()}
    where = common.environment(device)
    rows = [measure(engines, b, target, options) for b in options["batches"]]
    report([r["wall"] for r in rows], shares, options)
    if where["threads"] == 1 and where["device"] == "cpu":
        say("the same rounds by CPU time: what an idle machine would show, with one thread")
        report([r["cpu"] for r in rows], shares, options)
    content = {c: [{**asdict(r[c]), "limit": r[c].limit} for r in rows] for c in ("wall", "cpu")} | {
        "parameters": shares
    }
    common.write_results(
        "speedup", {**options, "draft": draft, "target": target, **asdict(settings)}, content, where, out
    )


def prepare_draft(target: Path, options: dict[str, Any], device: str) -> Path:
    """The user's draft, or one that we train."""
    if options["draft"] is not None:
        chosen: Path = options["draft"]
        return chosen
    settings = workload.DraftSettings(
        rollouts=options["rollouts"],
        tokens=max(options["tokens"], 64),
        temperature=options["temperature"],
        steps=options["train_steps"],
        k=options["k"],
        dtype=options["dtype"],
    )
    return workload.trained_draft(
        target, lambda count: workload.prompts_of(target, options["file"], count, seed=1), settings, device
    ).path


def measure(engines: dict[str, Remote], batch: int, target: Path, options: dict[str, Any]) -> dict[str, Row]:
    """All arms at one batch size, in turn; the same rounds by either clock."""
    rounds, k = options["rounds"], options["k"]
    prompts = workload.prompts_of(target, options["file"], batch * (rounds + 1), seed=1000 + batch)

    def arm(engine: Remote, width: int | None) -> Any:
        def run(index: int) -> Timing:
            if width is not None:
                engine.set_k(width)
            return engine.run(prompts[index * batch : (index + 1) * batch], options["temperature"], options["tokens"])

        return run

    arms = {name: arm(engine, None) for name, engine in engines.items() if name != "flag"}
    arms |= {"draft": arm(engines["flag"], k), "off": arm(engines["flag"], 0)}
    runs: dict[str, list[Timing]] = interleave(arms, rounds, 1, label=f"batch {batch}: {', '.join(arms)} in turn")
    return {clock: summarize(batch, runs, clock) for clock in ("wall", "cpu")}


def summarize(batch: int, runs: dict[str, list[Timing]], clock: str) -> Row:
    """The numbers of a batch size from all its rounds, by one clock: ``wall`` or ``cpu``."""
    rates = {name: [t.rate(clock) for t in timings] for name, timings in runs.items()}
    steps = {name: [t.step(clock) for t in timings] for name, timings in runs.items()}
    drafts, accepted = (sum(getattr(t, n) for t in runs["draft"]) for n in ("drafts", "accepted"))
    ms = {name: spread([1e3 * s for s in values]) for name, values in steps.items()}
    prefill = {name: spread([1e3 * t.prefill(clock) for t in timings]) for name, timings in runs.items()}
    count = {name: spread([float(len(t.steps) - 1) for t in timings]) for name, timings in runs.items()}
    return Row(
        batch=batch,
        plain=spread(rates["plain"]),
        draft=spread(rates["draft"]),
        off=spread(rates["off"]),
        live=spread(rates["live"]) if "live" in rates else None,
        speedup=paired(rates["draft"], rates["plain"]),
        against_live=paired(rates["draft"], rates["live"]) if "live" in rates else None,
        against_off=paired(rates["draft"], rates["off"]),
        acceptance_length=1 + accepted / drafts if drafts else 1.0,
        plain_step_ms=ms["plain"],
        live_step_ms=ms.get("live"),
        draft_step_ms=ms["draft"],
        off_step_ms=ms["off"],
        plain_prefill_ms=prefill["plain"],
        draft_prefill_ms=prefill["draft"],
        plain_steps=count["plain"],
        draft_steps=count["draft"],
        break_even=paired(steps["draft"], steps["plain"]),
    )


def report(rows: list[Row], parameters: dict[str, int], options: dict[str, Any]) -> None:
    """Print both tables."""
    share = parameters["draft"] / parameters["target"]
    title = (
        f"Rollout speed-up: {parameters['target'] / 1e6:.1f}M-parameter target, {options['dtype']}, k={options['k']}, "
        f"temperature {options['temperature']:g}, {options['tokens']} tokens per request; the draft has {share:.1%} of the "
        "target's parameters. Medians (quartiles)"
    )
    head = ["batch", "plain\ntok/s", "draft\ntok/s", "speed-up", "acceptance\nlength", "break-even", "limit", "goal"]
    body = []
    for r in rows:
        goal = "" if r.goal is None else verdict(r.speedup.median >= r.goal, f"≥ {r.goal}x")
        rates = [r.plain.text(), r.draft.text(), r.speedup.text(".2f")]
        body.append(
            [str(r.batch), *rates, f"{r.acceptance_length:.2f}", r.break_even.text(".2f"), f"{r.limit:.2f}", goal]
        )
    show(title, head, body)
    show_against(rows)
    show_where(rows)


def show_against(rows: list[Row]) -> None:
    """Print the speed-up over the other baselines."""
    head = ["batch", "live\ntok/s", "draft / live", "k=0\ntok/s", "draft / k=0"]
    body = []
    for r in rows:
        live = [_text(r.live, ".1f"), _text(r.against_live, ".2f")]
        body.append([str(r.batch), *live, r.off.text(), r.against_off.text(".2f")])
    show("Against a plain engine whose weights can change, and against the same engine with k=0", head, body)


def show_where(rows: list[Row]) -> None:
    """Print what a step costs, and how many there are."""
    head = [
        "batch",
        "plain",
        "live",
        "k=0",
        "draft",
        "steps\nplain",
        "steps\ndraft",
        "prefill ms\nplain",
        "prefill ms\ndraft",
    ]
    body = []
    for r in rows:
        times = [_text(s, ".1f") for s in (r.plain_step_ms, r.live_step_ms, r.off_step_ms, r.draft_step_ms)]
        counts = [f"{s.median:.0f}" for s in (r.plain_steps, r.draft_steps)]
        prefill = [f"{s.median:.1f}" for s in (r.plain_prefill_ms, r.draft_prefill_ms)]
        body.append([str(r.batch), *times, *counts, *prefill])
    show("Where the time goes: ms of a step with the whole batch; steps until the last request is done", head, body)


def _text(value: Spread | None, form: str) -> str:
    return "–" if value is None else value.text(form)


if __name__ == "__main__":
    main()
