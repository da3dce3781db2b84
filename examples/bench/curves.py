"""How fast a newborn draft learns: the defaults against what they replaced, while the policy stands still or moves."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from draft_training import Document, DraftConfig, DraftTrainer, HiddenBuffer, LossStats, TrainSettings  # noqa: E402
from draft_training.batch import pack  # noqa: E402
from draft_training.loss import replay  # noqa: E402
from examples.bench import common  # noqa: E402
from examples.bench.common import say, show  # noqa: E402
from examples.bench.objectives import OBJECTIVES, OtherTrainer  # noqa: E402
from examples.bench.recorded import FIRST, LATER, SAMPLES, Step, record  # noqa: E402
from examples.bench.subjects import Subject  # noqa: E402

HELP = """Learning curves of a newborn draft on a CPU, from rollouts that are recorded once.

\b
A trainer step is 12 prompts with 4 samples each, harvested by the plugin's own code; then the draft trains (longer in the
first step, its head start), and the draft is judged on rollouts that it has not seen:
  still    the policy stays what it is; judged on rollouts of the same policy
  moves    the policy takes a step of AdamW at 2e-4 after each trainer step, on its own samples with random advantages;
           judged on the *next* step's rollouts, as an engine would serve it
Arms, from the same seeds and with as many tokens through the draft in each step, come in groups:
  unroll   default (the normed output is fed back; three unrolled steps, and eight in every fourth optimizer step; prompts teach,
           too), residual (the residual stream is fed back, as EAGLE-3 has it) and short (three unrolled steps in all)
  losses   what is descended: kl-d-pace (the default, written out as the others are), kl, reverse-kl, jsd, ce, tv, nla, lk-hybrid,
           ce-tv, hit, d-pace, see objectives.py
  text     what a young draft reads: all rollouts (all), without what their prompts teach (no-prompts); and where a quarter of the
           rollouts is all that is kept (quarter): all of the first step's (first), all of a validation before it, too
           (validation), or that quarter without what its prompts teach (quarter-no-prompts)
Numbers are acceptance lengths, replayed on recorded samples (``LossStats.acceptance_length``), no engine and no time. The arm
perfect is a draft that guesses the policy's own likeliest token each time: none can be expected to do better; --seeds 0
shows it alone.
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


#: of a step: its rollouts, and a validation's, which comes with the first step only
Reading = Callable[[Step, Step | None], list[Document]]


def everything(now: Step, validation: Step | None) -> list[Document]:
    """All rollouts of a step."""
    return now.documents


def quarter(now: Step, validation: Step | None) -> list[Document]:
    """One sample of each prompt."""
    return now.documents[::SAMPLES]


def first_whole(now: Step, validation: Step | None) -> list[Document]:
    """A quarter, but everything in the first step."""
    return now.documents if validation else quarter(now, None)


def with_validation(now: Step, validation: Step | None) -> list[Document]:
    """Everything in the first step, and what a validation before it rolled out."""
    return [*validation.documents, *now.documents] if validation else quarter(now, None)


@dataclass(frozen=True)
class Arm:
    """How one draft is trained."""

    shape: Mapping[str, Any] = field(default_factory=dict)  # fields of the draft's config
    settings: Mapping[str, Any] = field(default_factory=lambda: {"ttt_steps": 8})
    objective: str | None = None  # of ``objectives``; None: the trainer's own
    reads: Reading = everything


GROUPS: dict[str, dict[str, Arm]] = {
    "unroll": {"default": Arm(), "residual": Arm({"norm_output": False}), "short": Arm(settings={"ttt_steps": 3})},
    "losses": {name: Arm(objective=name) for name in OBJECTIVES},
    "text": {
        "all": Arm(),
        "no-prompts": Arm(settings={"ttt_steps": 8, "context_share": 0.0}),
        "quarter": Arm(reads=quarter),
        "quarter-no-prompts": Arm(settings={"ttt_steps": 8, "context_share": 0.0}, reads=quarter),
        "first": Arm(reads=first_whole),
        "validation": Arm(reads=with_validation),
    },
}


@click.command(help=HELP, context_settings={"max_content_width": 120, "show_default": True})
@click.option(
    "--subject", "names", multiple=True, default=("add-96", "add-128", "sort-96", "sort-128"), help="TASK-WIDTH."
)
@click.option("--group", type=click.Choice(list(GROUPS)), default="unroll", help="Of arms.")
@click.option("--arm", "chosen", multiple=True, help="Only these arms of the group.")
@click.option("--policy", "policies", multiple=True, type=click.Choice(("still", "moves")), default=("still", "moves"))
@click.option("--steps", default=8, help="Trainer steps.")
@click.option("--seeds", default=3, help="Newborn drafts of each arm.")
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of the JSON file.")
def main(
    names: Sequence[str],
    group: str,
    chosen: Sequence[str],
    policies: Sequence[str],
    steps: int,
    seeds: int,
    out: Path,
) -> None:
    """Record, learn, report."""
    common.prepare_process(1)
    arms = {name: arm for name, arm in GROUPS[group].items() if not chosen or name in chosen}
    if unknown := set(chosen) - set(arms):
        raise click.BadParameter(f"{sorted(unknown)} is not in {group}: {', '.join(GROUPS[group])}")
    curves: list[Curve] = []
    for name in names:
        task, width = name.split("-")
        subject = Subject(task, int(width))  # type: ignore[arg-type]
        _, validation = record(subject, 1, moves=False, seed=12)
        for policy in policies:
            say(f"{name}, policy {policy}: {steps + 1} steps of rollouts")
            config, recorded = record(subject, steps + 1, moves=policy == "moves")
            curves.append(perfect((name, policy, "perfect", 0), recorded[1:]))
            for seed, arm in product(range(seeds), arms):
                where = (name, policy, arm, seed)
                curves.append(learn(where, arms[arm], config, recorded, validation[0]))
                say(f"{name}, {policy}, {arm}, seed {seed}: k=3 {curves[-1].k3}, k=8 {curves[-1].k8}")
    report(curves)
    asked = {"subjects": names, "arms": list(arms), "policies": policies, "steps": steps, "seeds": seeds}
    suffix = "" if group == "unroll" else f"-{group}"
    common.write_results(f"curves{suffix}", asked, [asdict(c) for c in curves], common.environment("cpu"), out)


def learn(
    where: tuple[str, str, str, int],
    arm: Arm,
    config: DraftConfig,
    recorded: Sequence[Step],
    validation: Step | None = None,
    first: int = FIRST,
) -> Curve:
    """Train a draft along the recorded steps, judging it on the step to come.

    Args:
        where: begins its row.
        arm: how it is trained.
        config: its shape.
        recorded: one step more than it is trained in.
        validation: rollouts from before the first step.
        first: tokens through it in the first step.
    """
    settings = TrainSettings(**{"tokens_per_step": 512, **arm.settings})
    kind = DraftTrainer if arm.objective is None else OtherTrainer
    trainer = kind(replace(config, **arm.shape), settings, device="cpu", seed=where[-1])
    if isinstance(trainer, OtherTrainer):
        trainer.objective = OBJECTIVES[arm.objective or ""]
    buffer = HiddenBuffer(65_536, 1 << 40, seed=0)
    k3, k8, seconds = [], [], 0.0
    for i, (now, coming) in enumerate(pairwise(recorded)):
        trainer.update_policy(now.embed, now.head, i)
        for document in arm.reads(now, None if i else validation):
            buffer.add(document)
        began = time.process_time()
        trainer.train_slice(buffer, float("inf"), (LATER if i else first) // settings.tokens_per_step)
        seconds += time.process_time() - began
        trainer.update_policy(coming.embed, coming.head, i + 1)
        k3.append(round(trainer.evaluate(coming.documents, steps=3).acceptance_length, 2))
        k8.append(round(trainer.evaluate(coming.documents, steps=8).acceptance_length, 2))
    return Curve(*where, k3, k8, round(seconds, 1))


def perfect(where: tuple[str, str, str, int], judged: Sequence[Step]) -> Curve:
    """What a draft would reach on these rollouts that drafts the policy's likeliest token, whatever comes before it."""
    lengths: dict[int, list[float]] = {3: [], 8: []}
    for step in judged:
        batch = pack(step.documents)
        likeliest = (batch.last[batch.rows] @ step.head.T).argmax(-1)
        hits = likeliest == batch.input_ids[batch.rows + 1]
        for k, found in lengths.items():
            valid = batch.valid(k)
            accepted, rounds = replay(hits & valid, valid, batch.rows)
            stats = LossStats(valid.sum(1).double(), torch.zeros_like(accepted), accepted, rounds)
            found.append(round(stats.acceptance_length, 2))
    return Curve(*where, lengths[3], lengths[8], 0.0)


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
