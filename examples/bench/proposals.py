"""What a newborn draft makes by its likeliest tokens, and by what training's replay chooses, on text of more and more entropy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, median

import click
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from draft_training import DraftConfig, DraftTrainer, HiddenBuffer, Sampled, TrainSettings, pack  # noqa: E402
from examples.bench import common  # noqa: E402
from examples.bench.common import say, show  # noqa: E402
from examples.bench.recorded import FIRST, LATER, Step, record  # noqa: E402
from examples.bench.subjects import Subject  # noqa: E402
from spec_plugin.api.config import SpecConfig  # noqa: E402
from spec_plugin.api.events import TargetInfo  # noqa: E402
from spec_plugin.api.method import Method  # noqa: E402
from spec_plugin.policy.proposals import Proposals  # noqa: E402
from spec_plugin.step_cost.chances import tokens_per_step  # noqa: E402

HELP = """Tokens a step of a newborn draft on a CPU, from rollouts that are recorded once, by greedy and by chosen proposals.

\b
A policy of a subject (TASK-WIDTH) rolls out at a temperature, which sets the entropy of its text, and moves as in curves.py. The
draft trains as by default; in each step it is judged on the next step's rollouts, as an engine would serve it:
  greedy   it proposes its likeliest tokens
  chosen   it proposes as the plugin would have it do: by what the step before has shown, in the first step a held-back eighth
Numbers are replayed on recorded samples: no engine and no time.
"""
KS = (3, 8)


@dataclass(frozen=True)
class Curve:
    """Tokens a step after each trainer step, by k."""

    subject: str
    temperature: float
    entropy: float  # nats a token, of all judged text
    likeliest: float  # mean probability of the policy's likeliest token
    seed: int
    greedy: dict[int, list[float]]
    chosen: dict[int, list[float]]
    temperatures: list[float]  # of the draft, relative
    perfect: dict[int, float]  # of a perfect draft with greedy proposals


@click.command(help=HELP, context_settings={"max_content_width": 120, "show_default": True})
@click.option("--subject", "names", multiple=True, default=("add-96", "sort-96"), help="TASK-WIDTH.")
@click.option("--temperature", "temperatures", multiple=True, default=(1.0, 1.5, 2.0, 2.5), help="Of the rollouts.")
@click.option("--steps", default=8, help="Trainer steps.")
@click.option("--seeds", default=3, help="Newborn drafts.")
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of the JSON file.")
def main(names: Sequence[str], temperatures: Sequence[float], steps: int, seeds: int, out: Path) -> None:
    """Record, learn, report."""
    common.prepare_process(1)
    curves = []
    for name, temperature in product(names, temperatures):
        task, width = name.split("-")
        say(f"{name} at temperature {temperature:g}: {steps + 1} steps of rollouts")
        subject = Subject(task, int(width))  # type: ignore[arg-type]
        config, recorded = record(subject, steps + 1, moves=True, temperature=temperature)
        for seed in range(seeds):
            curves.append(learn(name, temperature, seed, config, recorded))
            say(f"{name}, {temperature:g}, seed {seed}: greedy {curves[-1].greedy}, chosen {curves[-1].chosen}")
    report(curves)
    asked = {"subjects": names, "temperatures": temperatures, "steps": steps, "seeds": seeds}
    common.write_results("proposals", asked, [asdict(c) for c in curves], common.environment("cpu"), out)


def learn(name: str, temperature: float, seed: int, config: DraftConfig, recorded: Sequence[Step]) -> Curve:
    """Train a draft along the recorded steps, judging it on the step to come."""
    sampling = Sampled(temperature)
    trainer = DraftTrainer(config, TrainSettings(tokens_per_step=512, ttt_steps=max(KS)), device="cpu", seed=seed)
    target = TargetInfo("", {}, "float32", sampling={"temperature": temperature})
    engine = Method("eagle3", {"draft_sample_method": "probabilistic"})
    proposals = Proposals(SpecConfig(k=max(KS)), target, engine)
    buffer = HiddenBuffer(65_536, 1 << 40, seed=0)
    greedy, chosen, temperatures = {k: [] for k in KS}, {k: [] for k in KS}, []
    entropies, perfect = [], {k: [] for k in KS}
    for i, (now, coming) in enumerate(pairwise(recorded)):
        trainer.update_policy(now.embed, now.head, i)
        held = [] if i else now.documents[::8]
        for document in now.documents:
            if not any(document is other for other in held):
                buffer.add(document)
        trainer.train_slice(buffer, float("inf"), (LATER if i else FIRST) // 512)
        if held:
            proposals.judged(trainer.evaluate(held, max(KS), sampling=sampling))
        trainer.update_policy(coming.embed, coming.head, i + 1)
        temperatures.append(proposals.draft_temperature)
        for k in KS:
            found = trainer.evaluate(coming.documents, k, sampling=sampling)
            for made, at in ((greedy, 0.0), (chosen, proposals.draft_temperature)):
                made[k].append(round(tokens_per_step((*found.proposals.chances(at), 0.0), k), 3))
            perfect[k].append(tokens_per_step((*found.proposals.ceiling, 0.0), k))
        entropies.append(found.proposals.mean_entropy)
        proposals.judged(found)  # as it will be, on this text, before it trains on it
    return Curve(
        *(name, temperature, round(fmean(entropies), 3), round(_likeliest(recorded[1:], sampling), 3), seed),
        *(greedy, chosen, temperatures, {k: round(fmean(lengths), 2) for k, lengths in perfect.items()}),
    )


def _likeliest(steps: Sequence[Step], sampling: Sampled) -> float:
    """Mean probability of the policy's likeliest token, over what was judged."""
    found = []
    for step in steps:
        batch = pack(step.documents)
        found.append(sampling.log_probs(batch.last[batch.rows] @ step.head.T).amax(-1).exp())
    return float(torch.cat(found).mean())


def report(curves: Sequence[Curve]) -> None:
    """A row for each policy: medians of its seeds."""
    columns = ["policy", "T", "entropy", "max p", "perfect greedy k=3/8", "greedy k=3: 1, 4, last", "chosen k=3"]
    columns += ["greedy k=8", "chosen k=8", "ratio k=3/8, mean of 1, 4, last", "draft's temperature"]
    rows = []
    for name, temperature in dict.fromkeys((c.subject, c.temperature) for c in curves):
        found = [c for c in curves if (c.subject, c.temperature) == (name, temperature)]
        row = [name, f"{temperature:g}", f"{found[0].entropy:.2f}", f"{found[0].likeliest:.2f}"]
        row.append(f"{found[0].perfect[3]:.2f}/{found[0].perfect[8]:.2f}")
        ratios, at = [], (0, min(3, len(found[0].temperatures) - 1), -1)
        for k in KS:
            three = {way: [[getattr(c, way)[k][i] for c in found] for i in at] for way in ("greedy", "chosen")}
            row += [", ".join(f"{median(x):.2f}" for x in three[way]) for way in ("greedy", "chosen")]
            pairs = zip(three["greedy"], three["chosen"], strict=True)
            ratios.append(fmean(b / a for x, y in pairs for a, b in zip(x, y, strict=True)))
        row += ["/".join(f"{r:.2f}" for r in ratios), ", ".join(f"{c.temperatures[-1]:g}" for c in found)]
        rows.append(row)
    show("tokens a step of a newborn draft on rollouts to come", columns, rows)


if __name__ == "__main__":
    main()
