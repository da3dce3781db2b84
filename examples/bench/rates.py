"""Does one learning rate serve drafts of every width: acceptance after each trainer step, at thirds and threes of the default."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import median

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from draft_training import TrainSettings  # noqa: E402
from examples.bench import common  # noqa: E402
from examples.bench.common import say, show  # noqa: E402
from examples.bench.curves import Arm, Curve, learn  # noqa: E402
from examples.bench.recorded import FIRST, RATE, Step, record  # noqa: E402
from examples.bench.subjects import COUNT, LETTERS, Subject  # noqa: E402

HELP = """Learning rates of a newborn draft, by the width of its policy, on a CPU, from rollouts that are recorded once.

\b
As in curves.py, a trainer step is 12 prompts with 4 samples each, and the draft is judged on the next step's rollouts, while
the policy stands still or moves. Each policy learns to sort letters first; a row says how well it does.
Widths beyond 512 take long. On one core a policy of 1024 learns in twenty minutes, and each of its curves takes ten with --tokens
1024; one of 2048 learns in an hour, and a curve of --steps 3 --first 24576 takes half of one.
"""
#: by width: layers of the policy, and optimizer steps in which it learns its task
POLICIES = {128: (8, 320), 512: (4, 240), 1024: (4, 160), 2048: (2, 120)}


@click.command(help=HELP, context_settings={"max_content_width": 120, "show_default": True})
@click.option("--width", "widths", multiple=True, type=click.Choice([str(w) for w in POLICIES]), default=("128", "512"))
@click.option("--vocabulary", default=Subject.vocabulary, help="Of the policies.")
@click.option("--factor", "factors", multiple=True, type=float, default=(0.3, 1.0, 3.0), help="Of the default rate.")
@click.option("--policy", "policies", multiple=True, type=click.Choice(("still", "moves")), default=("still", "moves"))
@click.option("--policy-rate", default=RATE, help="Of the policy, where it moves; at width 1024 2e-4 ruins it.")
@click.option("--steps", default=8, help="Trainer steps.")
@click.option("--seeds", default=1, help="Newborn drafts of each.")
@click.option("--tokens", default=512, help="Of an optimizer step.")
@click.option("--first", default=FIRST, help="Tokens through a draft in the first trainer step.")
@click.option("--teach-only", is_flag=True, help="Only make the policies.")
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of the JSON file.")
def main(
    widths: Sequence[str],
    vocabulary: int,
    factors: Sequence[float],
    policies: Sequence[str],
    policy_rate: float,
    steps: int,
    seeds: int,
    tokens: int,
    first: int,
    teach_only: bool,
    out: Path,
) -> None:
    """Teach, record, learn, report."""
    common.prepare_process(1)
    curves: list[Curve] = []
    learnt: dict[str, float] = {}
    for width in map(int, widths):
        layers, teaching = POLICIES[width]
        subject = Subject("sort", width, teaching, layers=layers, vocabulary=vocabulary)
        subject.policy()
        if teach_only:
            continue
        for policy in policies:
            config, recorded = record(subject, steps + 1, moves=policy == "moves", rate=policy_rate)
            if policy == policies[0]:
                learnt[subject.name] = in_order(subject, recorded[0])
                say(f"{subject.name}: {learnt[subject.name]:.0%} of the lines that it writes are in order")
            for seed, factor in product(range(seeds), factors):
                where = (subject.name, policy, f"{factor:g}x", seed)
                curves.append(learn(where, arm_of(factor, tokens), config, recorded, first=first))
                say(f"{subject.name}, {policy}, {factor:g}x, seed {seed}: k=3 {curves[-1].k3}, k=8 {curves[-1].k8}")
    if curves:
        report(curves)
        asked = {
            "widths": widths,
            "vocabulary": vocabulary,
            "policy rate": policy_rate,
            "steps": steps,
            "tokens": tokens,
            "first": first,
            "lines in order": learnt,
        }
        common.write_results("rates", asked, [asdict(c) for c in curves], common.environment("cpu"), out)


def in_order(subject: Subject, step: Step) -> float:
    """Share of first lines that begin with the smallest letter: what a policy that knows its task writes but for its slips."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(subject.policy())
    right = 0
    for prompt, response in step.rows:
        asked = [c for c in tokenizer.decode(prompt, skip_special_tokens=True) if c in LETTERS][-COUNT:]
        right += tokenizer.decode(response)[:1] == min(asked)
    return right / len(step.rows)


def arm_of(factor: float, tokens: int) -> Arm:
    """Training at so many times the default rates, so many tokens a step."""
    rates = {"lr": TrainSettings.lr * factor, "vector_lr": TrainSettings.vector_lr * factor}
    return Arm(settings={**rates, "ttt_steps": 8, "tokens_per_step": tokens})


def report(curves: Sequence[Curve]) -> None:
    """A row for each rate: medians of its seeds, and what the last step is of the best rate's."""
    columns = ["policy", "it", "rate", "k=3 after step 1", "4", "last", "k=8 after step 1", "4", "last", "of the best"]
    cells: dict[tuple[str, str], dict[str, list[Curve]]] = {}
    for c in curves:
        cells.setdefault((c.subject, c.policy), {}).setdefault(c.arm, []).append(c)
    rows = []
    for where, by_factor in cells.items():
        last = {factor: median(c.k8[-1] for c in found) for factor, found in by_factor.items()}
        for factor, found in by_factor.items():
            row = [*where, factor]
            for lengths in ([c.k3 for c in found], [c.k8 for c in found]):
                row += [f"{median(x[min(i, len(x)) - 1] for x in lengths):.2f}" for i in (1, 4, len(lengths[0]))]
            rows.append([*row, f"{last[factor] / max(last.values()):.2f}"])
    show("acceptance length of a newborn draft on rollouts to come", columns, rows)


if __name__ == "__main__":
    main()
