"""How fast a newborn draft learns: the defaults against what they replaced, while the policy stands still or moves."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from draft_training import DraftConfig, DraftTrainer, HiddenBuffer, TrainSettings  # noqa: E402
from examples.bench import common  # noqa: E402
from examples.bench.common import say, show  # noqa: E402
from examples.bench.recorded import FIRST, LATER, Step, record  # noqa: E402
from examples.bench.subjects import Subject  # noqa: E402

HELP = """Learning curves of a newborn draft on a CPU, from rollouts that are recorded once.

\b
A trainer step is 12 prompts with 4 samples each, harvested by the plugin's own code; then the draft trains (longer in the
first step, its head start), and the draft is judged on rollouts that it has not seen:
  still    the policy stays what it is; judged on rollouts of the same policy
  moves    the policy takes a step of AdamW at 2e-4 after each trainer step, on its own samples with random advantages;
           judged on the *next* step's rollouts, as an engine would serve it
Arms: default (the normed output is fed back, the unroll grows to k=8), residual (the residual stream is fed back, as EAGLE-3 has
it: the default before) and short (the default with three unrolled steps), from the same seeds, as many tokens in each step.
Numbers are acceptance lengths, replayed on recorded samples (``LossStats.acceptance_length``), no engine and no time.
"""


@dataclass(frozen=True)
class Curve:
    """Acceptance lengths at k=3 and k=8 after each trainer step."""

    subject: str
    policy: str  # "still" or "moves"
    arm: str
    seed: int
    k3: list[float]
    k8: list[float]
    cpu_seconds: float  # of training the draft


#: by name: fields of the draft's config, and settings of its training
ARMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {"ttt_steps": 8}),
    "residual": ({"norm_output": False}, {"ttt_steps": 8}),
    "short": ({}, {"ttt_steps": 3}),
}


@click.command(help=HELP, context_settings={"max_content_width": 120, "show_default": True})
@click.option(
    "--subject", "names", multiple=True, default=("add-96", "add-128", "sort-96", "sort-128"), help="TASK-WIDTH."
)
@click.option("--steps", default=8, help="Trainer steps.")
@click.option("--seeds", default=3, help="Newborn drafts of each arm.")
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of the JSON file.")
def main(names: Sequence[str], steps: int, seeds: int, out: Path) -> None:
    """Record, learn, report."""
    common.prepare_process(1)
    curves: list[Curve] = []
    for name in names:
        task, width = name.split("-")
        subject = Subject(task, int(width))  # type: ignore[arg-type]
        for policy in ("still", "moves"):
            say(f"{name}, policy {policy}: {steps + 1} steps of rollouts")
            config, recorded = record(subject, steps + 1, moves=policy == "moves")
            for seed, arm in product(range(seeds), ARMS):
                curves.append(learn(name, policy, arm, seed, config, recorded))
                say(f"{name}, {policy}, {arm}, seed {seed}: k=3 {curves[-1].k3}, k=8 {curves[-1].k8}")
    report(curves)
    where = common.environment("cpu")
    common.write_results(
        "curves", {"subjects": names, "steps": steps, "seeds": seeds}, [asdict(c) for c in curves], where, out
    )


def learn(subject: str, policy: str, arm: str, seed: int, config: DraftConfig, recorded: Sequence[Step]) -> Curve:
    """Train a draft along the recorded steps, judging it on the step to come."""
    shape, own = ARMS[arm]
    settings = TrainSettings(**own, tokens_per_step=512)
    trainer = DraftTrainer(replace(config, **shape), settings, device="cpu", seed=seed)
    buffer = HiddenBuffer(65_536, 1 << 40, seed=0)
    k3, k8, seconds = [], [], 0.0
    for i, (now, coming) in enumerate(pairwise(recorded)):
        trainer.update_policy(now.embed, now.head, i)
        for document in now.documents:
            buffer.add(document)
        began = time.process_time()
        trainer.train_slice(buffer, float("inf"), (FIRST if i == 0 else LATER) // settings.tokens_per_step)
        seconds += time.process_time() - began
        trainer.update_policy(coming.embed, coming.head, i + 1)
        k3.append(round(trainer.evaluate(coming.documents, steps=3).acceptance_length, 2))
        k8.append(round(trainer.evaluate(coming.documents, steps=8).acceptance_length, 2))
    return Curve(subject, policy, arm, seed, k3, k8, round(seconds, 1))


def report(curves: Sequence[Curve]) -> None:
    """A row for each arm: medians of its seeds, the spread of the last step behind them."""
    columns = ["policy", "it", "arm", "k=3 after step 1", "4", "last", "k=8 after step 1", "4", "last", "CPU s"]
    arms: dict[tuple[str, str, str], list[Curve]] = {}
    for c in curves:
        arms.setdefault((c.subject, c.policy, c.arm), []).append(c)
    rows = []
    for where, found in arms.items():
        row = list(where)
        for lengths in ([c.k3 for c in found], [c.k8 for c in found]):
            row += [f"{median(x[min(i, len(x)) - 1] for x in lengths):.2f}" for i in (1, 4)]
            last = [x[-1] for x in lengths]
            row.append(f"{median(last):.2f} ({min(last):.2f}-{max(last):.2f})")
        rows.append([*row, f"{median(c.cpu_seconds for c in found):.0f}"])
    show("acceptance length of a newborn draft on rollouts to come", columns, rows)


if __name__ == "__main__":
    main()
