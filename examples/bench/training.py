"""Generation and step time of the quickstart's GRPO run, with the flag and without, run after run in turn."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from examples.bench import common  # noqa: E402
from examples.bench.common import Spread, say, show, spread, verdict  # noqa: E402
from examples.quickstart import report  # noqa: E402
from examples.quickstart.policy import QUICKSTART, cached_policy  # noqa: E402
from examples.quickstart.trainers import TRAINERS, Start  # noqa: E402

HELP = """Measure what the flag does to a whole GRPO run: the quickstart's, from a cold draft, in verl or OpenRLHF.

\b
Runs without the flag and with it take turns (--repeats each), same policy, prompts and seeds. From the step at which the
controller turned speculation on for good, generation time per token and step time are compared with the same steps of
the runs without. OVERRIDES are passed to the trainer, as in the quickstart.
"""

GENERATION_GOAL, STEP_GOAL = 2.5, 1.4


@dataclass(frozen=True)
class Comparison:
    """With the flag against without, over the steps that speculate for good."""

    first_step: int  # of these
    generation: Spread  # speed-up of tokens per second, step by step
    step: Spread  # the same of whole steps, per token of the response
    acceptance_length: Spread


@click.command(
    help=HELP, context_settings={"ignore_unknown_options": True, "max_content_width": 120, "show_default": True}
)
@click.option("--trainer", "name", default="verl", type=click.Choice(list(TRAINERS)), help="Which one.")
@click.option("--steps", default=30, help="GRPO steps of each run.")
@click.option("--repeats", default=1, help="Runs of each kind.")
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of JSON and PNG.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def main(name: str, steps: int, repeats: int, out: Path, overrides: tuple[str, ...]) -> None:
    """Run, compare, report."""
    where = common.environment("cpu")
    runs: dict[str, list[list[report.Record]]] = {"plain": [], "flag": []}
    for repeat in range(repeats):
        for kind in ("plain", "flag"):
            runs[kind].append(run(name, kind, steps, out / f"training-{name}-{kind}-{repeat}", overrides))
    found = compare(runs["plain"], runs["flag"])
    if found is None:
        say("the controller never turned speculation on for good: there is nothing to compare")
    else:
        tell(name, steps, found, runs)
    settings = {"trainer": name, "steps": steps, "repeats": repeats, "overrides": overrides}
    file = common.write_results("training", settings, {"comparison": found, "runs": runs}, where, out)
    write_picture(name, runs, file.with_suffix(".png"))
    say(f"picture: {file.with_suffix('.png')}")


def run(name: str, kind: str, steps: int, out: Path, overrides: tuple[str, ...]) -> list[report.Record]:
    """One run of the quickstart."""
    trainer, settings, cache = TRAINERS[name], QUICKSTART, ROOT / ".cache" / "quickstart"
    policy = cached_policy(cache, settings)
    plain = kind == "plain"
    chosen = tuple(o for o in overrides if not (plain and ("spec." in o)))
    start = Start(policy, cache / f"data-{settings.digest}", settings, out.absolute(), steps, plain, chosen)
    say(f"{trainer.name}, {kind}: {steps} steps")
    records = []
    for step, metrics in trainer.run(start).follow():
        records.append(report.record(step, metrics, trainer))
        if step % 5 == 0:
            say(f"{kind}: step {step} of {steps}")
    return records


def rate(record: report.Record, what: str) -> float:
    """Response tokens (of the mean response) per second."""
    tokens, seconds = record["response_tokens"], record[what]
    assert tokens is not None and seconds is not None
    return tokens / seconds


def turned_on(records: list[report.Record]) -> int | None:
    """Index of the first step from which speculation stayed on; None if it is off at the end."""
    off = [i for i, r in enumerate(records) if not r["speculating"]]
    first = off[-1] + 1 if off else 0
    return first if first < len(records) else None


def compare(plain: list[list[report.Record]], flag: list[list[report.Record]]) -> Comparison | None:
    """All repeats together, step by step."""
    begins = [turned_on(records) for records in flag]
    if any(b is None for b in begins):
        return None
    first = max(b for b in begins if b is not None)
    generation, whole, accepted = [], [], []
    for without, with_flag in zip(plain, flag, strict=True):
        for a, b in list(zip(without, with_flag, strict=True))[first:]:
            generation.append(rate(b, "generation_s") / rate(a, "generation_s"))
            whole.append(rate(b, "step_s") / rate(a, "step_s"))
            accepted.append(float(b["acceptance_length"] or 1.0))
    if not generation:
        return None
    return Comparison(first + 1, spread(generation), spread(whole), spread(accepted))


def tell(name: str, steps: int, found: Comparison, runs: dict[str, list[list[report.Record]]]) -> None:
    """Print the comparison."""
    reward = {}
    for kind, all_runs in runs.items():
        reward[kind] = spread([float(r["reward"] or 0.0) for records in all_runs for r in records[-5:]]).median
    goals = [
        verdict(found.generation.median >= GENERATION_GOAL, f"≥ {GENERATION_GOAL}x"),
        verdict(found.step.median >= STEP_GOAL, f"≥ {STEP_GOAL}x"),
    ]
    row = [
        f"{found.first_step} to {steps}",
        found.acceptance_length.text(".2f"),
        found.generation.text(".2f"),
        goals[0],
        found.step.text(".2f"),
        goals[1],
        f"{reward['flag']:.2f} / {reward['plain']:.2f}",
    ]
    head = [
        "steps",
        "acceptance\nlength",
        "generation\nspeed-up",
        "goal",
        "step\nspeed-up",
        "goal",
        "last rewards\nwith / without",
    ]
    show(
        f"GRPO in {TRAINERS[name].name}: with the flag against without, per response token. Medians (quartiles)",
        head,
        [row],
    )


def write_picture(name: str, runs: dict[str, list[list[report.Record]]], file: Path) -> None:
    """Reward, acceptance length, generation and step time, step by step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels: dict[str, Any] = {
        "reward": "share of correct sums",
        "acceptance_length": "tokens per target forward",
        "generation_s": "generation, s",
        "step_s": "whole step, s",
    }
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.6), constrained_layout=True)
    for axis, (key, label) in zip(axes, panels.items(), strict=True):
        for kind, colour in (("plain", "tab:gray"), ("flag", "tab:blue")):
            for i, records in enumerate(runs[kind]):
                points = [(r["step"], r[key]) for r in records if r[key] is not None]
                if points:
                    axis.plot(
                        *zip(*points, strict=True), color=colour, label=kind if i == 0 else None, lw=1.4, alpha=0.85
                    )
        axis.set_xlabel("GRPO step")
        axis.set_title(label, fontsize=10)
        axis.grid(alpha=0.25)
        if key.endswith("_s"):
            values = sorted(float(r[key] or 0.0) for all_runs in runs.values() for rows in all_runs for r in rows)
            axis.set_ylim(0, 1.3 * values[int(0.95 * (len(values) - 1))])
    axes[0].legend()
    figure.suptitle(f"GRPO in {TRAINERS[name].name}, with the flag and without")
    figure.savefig(file, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
