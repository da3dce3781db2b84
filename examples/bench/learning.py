"""How a draft starts, whether it trains along the run, and k: the paper's comparison at our scale, in one command."""

from __future__ import annotations

import math
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from draft_training import DraftConfig, DraftTrainer, HiddenBuffer, TrainSettings, save_draft  # noqa: E402
from examples.bench import common, starts, workload  # noqa: E402
from examples.bench.common import interleave, paired, say, spread  # noqa: E402
from examples.bench.comparison import ARMS, Arm, Replay, Served, conclusions, to_serve  # noqa: E402
from examples.bench.learning_report import report, tell, write_picture  # noqa: E402
from examples.bench.recorded import FIRST, LATER, Row, Step, record  # noqa: E402
from examples.bench.steering import Steered, calibrate  # noqa: E402
from examples.bench.subjects import Subject  # noqa: E402
from spec_plugin.api.events import SelfTestReport  # noqa: E402
from spec_plugin.policy.held_out import CONTEXT, EACH  # noqa: E402

if TYPE_CHECKING:
    from examples.bench.engines import Remote, Timing

HELP = """Compare how a draft starts, whether it is trained along the run, and k: what NeMo RL's paper on speculative
rollouts (arXiv 2604.26779) compares, on policies of a million parameters.

\b
For each --policy:
  1. A GRPO-like run is recorded: --steps trainer steps of 12 prompts with 4 samples, after each of which the policy moves
     (AdamW at 2e-4, random advantages: as far as in a run, in a direction of no interest).
  2. Drafts start in three ways, the last two with the same number of optimizer steps (--start-steps) before the run:
       newborn   untrained
       other     on text that is not of the task (--other)
       own       on the policy's own rollouts of the task, with other prompts than the run's
     and are then frozen, or trained online on each step's rollouts: six arms. A newborn draft has a head start in the
     first trainer step, as the plugin grants it.
  3. Replay: at every step, the draft of the steps before it on the rollouts of this one, for each k: the acceptance length
     that an engine would have had.
  4. Engine: the policy of each step in --at, padded so that its forward pass costs what a larger model's does (--width),
     in one vLLM engine with the flag. Each draft runs with no drafts, each fixed k, and under the plugin's controller, which
     is told how the draft did on the rollouts of the step before. Requests are as long as the recorded answers, so the
     batch drains. Speeds are ratios to no drafts, round by round.
  5. Tables, a picture, and what follows from the numbers, with the cases where the expected order fails.

A quick look at all of it: --policy add-96 --steps 2 --at 0 --at 2 --rounds 1 --width 0 --rollouts 32 --start-steps 10
"""


@dataclass(frozen=True)
class Options:
    """How to run it; see --help."""

    steps: int
    at: tuple[int, ...]
    ks: tuple[int, ...]
    other: starts.Other
    rollouts: int
    start_steps: int
    rounds: int
    batch: int
    tokens: int
    width: int
    threads: int | None

    @property
    def k(self) -> int:
        """Most tokens drafted."""
        return max(self.ks)


@dataclass(frozen=True)
class Policy:
    """A policy and how it samples: ``TASK-WIDTH``, or ``TASK-WIDTH@TEMPERATURE``."""

    subject: Subject
    temperature: float

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read a value of --policy.

        Raises:
            click.BadParameter: if it is none.
        """
        name, _, temperature = text.partition("@")
        task, _, width = name.partition("-")
        if task not in starts.ALPHABETS or not width.isdigit() or int(width) % 32:
            raise click.BadParameter(f"{text!r}: wanted is TASK-WIDTH[@TEMPERATURE], as sort-96@1.4; tasks: add, sort")
        try:
            return cls(Subject(task, int(width)), float(temperature or 1.0))  # type: ignore[arg-type]
        except ValueError:
            raise click.BadParameter(f"{text!r}: the temperature {temperature!r} is no number") from None

    @property
    def name(self) -> str:
        """For tables."""
        return self.subject.name + f" at temperature {self.temperature:g}" * (self.temperature != 1.0)


@click.command(help=HELP, context_settings={"max_content_width": 120, "show_default": True})
@click.option(
    "--policy",
    "names",
    multiple=True,
    default=("add-128", "sort-96@1.4"),
    help="TASK-WIDTH[@TEMPERATURE]; tasks: add (easy text), sort (hard text at a high temperature). May be repeated.",
)
@click.option("--steps", default=8, help="Trainer steps.")
@click.option("--at", multiple=True, type=int, default=(0, 2, 4, 8), help="Serve at this step; may be repeated.")
@click.option("--k", "ks", multiple=True, type=int, default=(1, 3, 5, 7), help="Tokens drafted; 3 must be one of them.")
@click.option(
    "--other",
    type=click.Choice(("strings", "task")),
    default="strings",
    help="Text of the start on other text. strings: the policy's own answers to plain strings of the task's alphabet; "
    "task: questions and answers of the other task, which the policy only reads.",
)
@click.option("--rollouts", default=256, help="Answers of the text before the run.")
@click.option("--start-steps", default=160, help="Optimizer steps before the run.")
@click.option("--rounds", default=3, help="Rounds that count; one more warms up.")
@click.option("--batch", default=8, help="Requests at once.")
@click.option("--tokens", default=48, help="Most tokens of a request; it ends where the recorded answer did.")
@click.option("--width", default=32768, help="Units of the padded MLPs (32768: about 100M parameters); 0: not padded.")
@click.option("--threads", type=int, help="Compute threads; default: all cores.")
@click.option("--replay-only", is_flag=True, help="Start no engine.")
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of JSON and PNG.")
def main(names: Sequence[str], replay_only: bool, out: Path, **raw: Any) -> None:
    """Record, learn, serve, report."""
    options, policies = Options(**raw), [Policy.parse(name) for name in names]
    if 3 not in options.ks:
        raise click.BadParameter("3 must be one of them: it is what the others are compared with", param_hint="--k")
    if beyond := [step for step in options.at if not 0 <= step <= options.steps]:
        raise click.BadParameter(f"{beyond} is outside of a run of {options.steps} steps", param_hint="--at")
    common.prepare_process(options.threads)
    replays: list[Replay] = []
    served: list[Served] = []
    common.CACHE.mkdir(parents=True, exist_ok=True)
    text_tokens: dict[str, dict[str, int]] = {}
    for policy in policies:
        with tempfile.TemporaryDirectory(prefix="learning-", dir=common.CACHE) as folder:
            run = Run(policy, options, Path(folder))
            replays += run.learn()
            served += [] if replay_only else run.serve(replays)
            text_tokens[policy.name] = run.text_tokens
        report(policy.name, replays, served, options.ks)
    said = {policy.name: conclusions(policy.name, replays, served) for policy in policies}
    tell(said)
    rows = {"replays": [asdict(r) for r in replays], "served": [asdict(s) for s in served], "conclusions": said}
    settings = {**asdict(options), "policies": names, "text_tokens": text_tokens}
    file = common.write_results("learning", settings, rows, common.environment("cpu"), out)
    write_picture(replays, served, options.ks, file.with_suffix(".png"))
    say(f"picture: {file.with_suffix('.png')}")


class Run:
    """One policy's run, recorded in a folder: the policies and the drafts of the steps that are served."""

    def __init__(self, policy: Policy, options: Options, folder: Path) -> None:
        self.policy, self.options, self.folder = policy, options, folder
        subject, temperature = policy.subject, policy.temperature
        say(f"{policy.name}: recording {options.steps + 1} steps of rollouts")
        keep = {step: folder / f"policy-{step}" for step in options.at}
        self.config, self.recorded = record(subject, options.steps + 1, True, temperature, keep)
        before = (options.rollouts, options.start_steps, options.k)
        own = starts.start(subject, "own", temperature, *before)
        other = starts.start(subject, options.other, temperature, *before)
        self.tensors: dict[str, Mapping[str, Tensor] | None] = {
            "newborn": None,
            "own": own.tensors,
            "other": other.tensors,
        }
        self.text_tokens = {"own": own.text_tokens, "other": other.text_tokens}

    def learn(self) -> list[Replay]:
        """Every arm along all steps."""
        found: list[Replay] = []
        for arm in ARMS:
            along = learn(self.config, self.recorded, arm, self.tensors[arm.start], self.options)
            for replay, tensors in along:
                found.append(replace(replay, policy=self.policy.name))
                if replay.step in self.options.at:
                    save_draft(self._draft(arm, replay.step), self.config, tensors)
            curve = " ".join(f"{r.lengths[3]:.2f}" for r in found[-len(self.recorded) :])
            say(f"{self.policy.name}, {arm.name}: acceptance length at k=3, step by step: {curve}")
        return found

    def serve(self, replays: Sequence[Replay]) -> list[Served]:
        """Every arm in an engine, at the chosen steps."""
        promised = {(r.arm, r.step): r.promised for r in replays if r.policy == self.policy.name}
        found: list[Served] = []
        calibration: SelfTestReport | None = None
        for step in sorted(set(self.options.at)):
            with self._engine(step) as flag:
                # a step costs what it did in the first engine: the policy has moved, its shape has not
                calibration = calibration or self._calibrate(flag)
                for arm, alike in to_serve(step, min(self.options.at)).items():
                    (file,) = self._draft(arm, step).glob("*.safetensors")
                    flag.install(file, version=1 + ARMS.index(arm))
                    given, k, seats = arm.start != "newborn", self.options.k, self.options.batch
                    steered = Steered(flag, calibration, promised[arm.name, step], k=k, max_num_seqs=seats, given=given)
                    rows = self.recorded[step].rows
                    cell = serve(flag, steered, rows, self.policy.temperature, self.options, f"step {step}, {arm.name}")
                    found += [replace(cell, policy=self.policy.name, arm=a.name, step=step) for a in alike]
        return found

    def _draft(self, arm: Arm, step: int) -> Path:
        return self.folder / f"{arm.name.replace(', ', '-')}-{step}"

    @contextmanager
    def _engine(self, step: int) -> Iterator[Remote]:
        from examples.bench.engines import EngineSettings, Remote  # slow to import

        options = self.options
        padded = workload.padded_target(self.folder / f"policy-{step}", options.width, "float32")
        settings = EngineSettings(max_num_seqs=options.batch)
        say(f"{self.policy.name}: starting the engine of step {step}")
        engine = Remote(options.threads, "flag", padded, settings, self._draft(Arm("own", False), step), options.k)
        try:
            yield engine.wait()
        finally:
            engine.close()
            shutil.rmtree(padded)  # hundreds of megabytes that no other run will ask for

    def _calibrate(self, flag: Remote) -> SelfTestReport:
        say("calibrating")
        batch = self.options.batch
        prompts = self.policy.subject.prompts(batch, seed=5)
        return calibrate(flag, prompts, sorted({1, max(1, batch // 2), batch}), self.options.k)


def learn(
    config: DraftConfig, recorded: Sequence[Step], arm: Arm, start: Mapping[str, Tensor] | None, options: Options
) -> Iterator[tuple[Replay, dict[str, Tensor]]]:
    """Take a draft along the recorded steps: judged on each before it trains on it, as in a trainer.

    Yields:
        What an engine would serve at each step: its acceptance on the rollouts of this step, and its weights.
    """
    settings = TrainSettings(ttt_steps=options.k, tokens_per_step=starts.TOKENS)
    trainer = DraftTrainer(config, settings, device="cpu", seed=0, tensors=start)
    buffer = HiddenBuffer(65_536, 1 << 40, seed=0)
    promised: tuple[float, ...] = ()
    for step, now in enumerate(recorded):
        trainer.update_policy(now.embed, now.head, step)
        found = {k: trainer.evaluate(now.documents, steps=k) for k in options.ks}
        lengths = {k: round(r.acceptance_length, 3) for k, r in found.items()}
        yield Replay("", arm.name, step, lengths, promised), trainer.engine_tensors()
        promised = found[options.k].chances
        if not arm.online:
            continue
        unseen = step == 0 and start is None
        for document in now.documents:
            buffer.add(document)
        # as in the plugin, some of its first text is kept from a newborn draft, so that it can be judged at once
        held = buffer.newest(int(0.125 * buffer.tokens) if unseen else 0, EACH)
        with buffer.without(held):
            trainer.train_slice(buffer, math.inf, (FIRST if unseen else LATER) // settings.tokens_per_step)
        if held:
            promised = trainer.evaluate(held, options.k, CONTEXT).chances


def serve(
    flag: Remote, steered: Steered, rows: Sequence[Row], temperature: float, options: Options, label: str
) -> Served:
    """The installed draft with no drafts, each k, and under the controller, in turn."""
    mixed = random.Random(0).sample(rows, len(rows))

    def asked(index: int) -> tuple[workload.Prompts, list[int]]:
        batch = [mixed[(index * options.batch + i) % len(mixed)] for i in range(options.batch)]
        return [prompt for prompt, _ in batch], [min(options.tokens, len(response)) for _, response in batch]

    def fixed(k: int, index: int) -> Timing:
        prompts, lengths = asked(index)
        flag.set_k(k)
        return flag.run(prompts, temperature, lengths)

    def controlled(index: int) -> Timing:
        prompts, lengths = asked(index)
        return steered.run(index, prompts, temperature, lengths)

    arms: dict[str, Callable[[int], Timing]] = {f"k={k}": partial(fixed, k) for k in (0, *options.ks)}
    arms["controller"] = controlled
    runs = interleave(arms, options.rounds, 1, label)
    rates = {name: [t.rate("wall") for t in timings] for name, timings in runs.items()}
    return Served(
        policy="",
        arm="",
        step=-1,
        plain=spread(rates["k=0"]),
        speed={name: paired(rates[name], rates["k=0"]) for name in arms if name != "k=0"},
        lengths={name: round(_acceptance(timings), 3) for name, timings in runs.items() if name != "k=0"},
        chosen=steered.chosen,
    )


def _acceptance(timings: Sequence[Timing]) -> float:
    drafts = sum(t.drafts for t in timings)
    return 1 + sum(t.accepted for t in timings) / drafts if drafts else 1.0


if __name__ == "__main__":
    main()
