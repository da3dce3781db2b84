"""How fast a newborn draft learns: the present optimizer against the one before it, while the policy stands still or moves."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import click
import torch

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
Arms: new (Muon, the defaults) and old (AdamW at 1e-3, unroll 3: the defaults before it), as many tokens in each step.
Numbers are acceptance lengths, replayed on recorded samples (``LossStats.acceptance_length``), no engine and no time.
"""


@dataclass(frozen=True)
class Curve:
    """Acceptance lengths at k=3 and k=8 after each trainer step."""

    subject: str
    policy: str  # "still" or "moves"
    arm: str
    k3: list[float]
    k8: list[float]
    cpu_seconds: float  # of training the draft

    def reached(self, length: float) -> int | None:
        """The first trainer step, from 1, after which k=3 makes so many tokens a step."""
        return next((i + 1 for i, found in enumerate(self.k3) if found >= length), None)


class AdamW:
    """The optimizer before Muon, with the interface of ``DraftOptimizer`` that the trainer's steps use."""

    def __init__(self, trainer: DraftTrainer) -> None:
        self._adamw = torch.optim.AdamW(trainer._trained.values(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
        self._steps = 0

    def zero_grad(self) -> None:
        self._adamw.zero_grad()

    def step(self, factor: float) -> None:
        """Its own warm-up of 20 steps, then constant."""
        self._steps += 1
        for group in self._adamw.param_groups:
            group["lr"] = 1e-3 * min(1.0, self._steps / 20)
        self._adamw.step()


@click.command(help=HELP, context_settings={"max_content_width": 120, "show_default": True})
@click.option(
    "--subject", "names", multiple=True, default=("add-96", "add-128", "sort-96", "sort-128"), help="TASK-WIDTH."
)
@click.option("--steps", default=8, help="Trainer steps.")
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of the JSON file.")
def main(names: Sequence[str], steps: int, out: Path) -> None:
    """Record, learn, report."""
    common.prepare_process(1)
    curves: list[Curve] = []
    for name in names:
        task, width = name.split("-")
        subject = Subject(task, int(width))  # type: ignore[arg-type]
        for policy in ("still", "moves"):
            say(f"{name}, policy {policy}: {steps + 1} steps of rollouts")
            config, recorded = record(subject, steps + 1, moves=policy == "moves")
            for arm in ("new", "old"):
                curves.append(learn(name, policy, arm, config, recorded))
                say(f"{name}, {policy}, {arm}: k=3 {curves[-1].k3}, k=8 {curves[-1].k8}")
    report(curves)
    where = common.environment("cpu")
    common.write_results("curves", {"subjects": names, "steps": steps}, [asdict(c) for c in curves], where, out)


def learn(subject: str, policy: str, arm: str, config: DraftConfig, recorded: Sequence[Step]) -> Curve:
    """Train a draft along the recorded steps, judging it on the step to come."""
    new = arm == "new"
    settings = TrainSettings(ttt_steps=8 if new else 3, tokens_per_step=512 if new else 1024)
    trainer = DraftTrainer(config, settings, device="cpu", seed=0)
    if not new:
        trainer._optimizer = AdamW(trainer)  # type: ignore[assignment]
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
    return Curve(subject, policy, arm, k3, k8, round(seconds, 1))


def report(curves: Sequence[Curve]) -> None:
    """A row for each curve."""
    columns = [
        "policy",
        "it",
        "arm",
        "k=3 after step 1",
        "2",
        "4",
        "last",
        "k=8 last",
        "2.5 at step",
        "3.3 at step",
        "CPU s",
    ]
    rows = []
    for c in curves:
        at = [c.k3[min(i, len(c.k3)) - 1] for i in (1, 2, 4)] + [c.k3[-1], c.k8[-1]]
        reached = [c.reached(length) for length in (2.5, 3.3)]
        rows.append(
            [
                c.subject,
                c.policy,
                c.arm,
                *(f"{x:.2f}" for x in at),
                *(str(r or "–") for r in reached),
                f"{c.cpu_seconds:.0f}",
            ]
        )
    show("acceptance length of a newborn draft on rollouts to come", columns, rows)


if __name__ == "__main__":
    main()
