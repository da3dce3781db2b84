"""The quickstart: GRPO in verl, OpenRLHF or TRL on this CPU, with one flag for speculative rollouts."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from transformers.utils.logging import disable_progress_bar

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from spec_plugin_conformance.launch import RunFailed  # noqa: E402

from examples.quickstart import report  # noqa: E402
from examples.quickstart.policy import QUICKSTART, cached_policy, policy_folder  # noqa: E402
from examples.quickstart.trainers import PROMPTS_PER_STEP, TRAINERS, Run, Start, Trainer  # noqa: E402

HELP = f"""Train a tiny policy with GRPO in verl, OpenRLHF or TRL, on this CPU, with speculative rollouts.

\b
What happens:
  1. A small Qwen3 is taught column addition from examples with slips in them, so that it gets about half of
     the sums right (a minute or two; cached under .cache/quickstart). Then it gets 24 more layers, which change
     nothing at first: its forward pass costs something now, as a large policy's does.
  2. The trainer starts: a real actor, a real vLLM engine, and Ray where the trainer has it. The plugin is one flag:
       verl      {TRAINERS["verl"].flag}
       OpenRLHF  {TRAINERS["openrlhf"].flag}
       TRL       {TRAINERS["trl"].flag}
  3. In each GRPO step the engine drafts with an EAGLE-3 head that did not exist before the run: it is trained
     on what the actor computes anyway, and refreshed in the engine after each weight sync.
  4. A table, a picture and a JSON file show reward, acceptance length, draft loss and times.

\b
OVERRIDES are passed on to the trainer, for example:
  verl      actor_rollout_ref.rollout.n=4                      verl's own settings
            +actor_rollout_ref.rollout.custom.spec.k=5         the plugin's options
  OpenRLHF  --rollout.n_samples_per_prompt 4                   OpenRLHF's own flags
            --ds.packing_samples                               packed samples, on a CPU too
            --spec.k 5                                         the plugin's options
  TRL       num_generations=4                                  fields of GRPOConfig, as JSON
            spec.k=5                                           the plugin's options
"""

console = Console(width=None if sys.stdout.isatty() else 110)


@click.command(help=HELP, context_settings={"ignore_unknown_options": True, "max_content_width": 120})
@click.option("--trainer", "name", default="verl", show_default=True, type=click.Choice(list(TRAINERS)))
@click.option("--steps", default=12, show_default=True, type=click.IntRange(1), help="GRPO steps.")
@click.option(
    "--prompts",
    default=PROMPTS_PER_STEP,
    show_default=True,
    type=click.IntRange(PROMPTS_PER_STEP),
    help=f"Different sums that the run goes through again and again. With {PROMPTS_PER_STEP} each step has the same ones, and "
    "the reward rises in a few steps; with 1024 in some 60.",
)
@click.option("--plain", is_flag=True, help="The same run without the plugin, in a folder of its own.")
@click.option("--compare", is_flag=True, help="Both, in turns of three steps: while one works the other is stopped.")
@click.option(
    "--policy",
    "family",
    default="qwen3",
    show_default=True,
    type=click.Choice(["qwen3", "mimo"]),
    help="mimo: a Qwen2 with a layer for multi-token prediction, for spec.method=mtp.",
)
@click.option("--fresh", is_flag=True, help="Teach the policy again instead of taking it from the cache.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder of the results.  [default: runs/quickstart/TRAINER, TRAINER-plain or TRAINER-compare]",
)
@click.option("--cache", default=ROOT / ".cache" / "quickstart", type=click.Path(path_type=Path), hidden=True)
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def main(
    name: str,
    steps: int,
    prompts: int,
    plain: bool,
    compare: bool,
    family: str,
    fresh: bool,
    out: Path | None,
    cache: Path,
    overrides: tuple[str, ...],
) -> None:
    """Build policy and data, run the trainer, report."""
    begin = time.monotonic()
    trainer, settings = TRAINERS[name], replace(QUICKSTART, family=family)
    folder = Path("runs/quickstart") / f"{name}{'-compare' if compare else '-plain' if plain else ''}"
    out = (out or folder).absolute()
    disable_progress_bar()
    if fresh:
        shutil.rmtree(cache, ignore_errors=True)
    data = cache / f"data-{settings.digest}-{prompts}"
    start = Start(policy_folder(cache, settings), data, settings, out, steps, plain, overrides, prompts)
    if compare:
        cached_policy(cache, settings)
        both_in_turns(trainer, start)
        return
    run = trainer.run(start)
    launch = run.launch()
    if launch.interpreter is not None:
        launch.interpreter.executable(launch.env)  # the trainer's imports, while the policy is taught
    cached_policy(cache, settings)
    log = launch.log_file
    console.print(
        f"{'plain run, without the plugin' if plain else trainer.flag}\nall output of {trainer.name}: {log}",
        highlight=False,
    )
    began = time.monotonic()
    try:
        records = watch(run, trainer, log)
    except RunFailed as error:
        console.print("[red]the run failed[/red]: ", end="")
        console.print(f"{error}\nthe whole log: {log}", highlight=False, markup=False)
        sys.exit(1)
    ended = time.monotonic()
    conclude(run, trainer, records, ended - begin, report.parts(records, ended - began))


def both_in_turns(trainer: Trainer, start: Start) -> None:
    """With the flag and without, side by side."""
    from examples.quickstart import side_by_side

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    runs = {}
    for kind in side_by_side.KINDS:
        plain = kind == "plain"
        # nobody reads the plugin's options in a plain run; where they are flags a trainer would refuse them
        ours = tuple(word for word in start.overrides if not (plain and word.startswith(("spec.", "--spec."))))
        runs[kind] = trainer.run(replace(start, plain=plain, out=start.out / kind, overrides=ours))
    say(f"{trainer.flag}, and the same run without it, in turns of three steps; logs in {start.out}")
    rows = side_by_side.run_in_turns(runs, trainer, start.out, 3, say)
    found = side_by_side.sums(rows)
    side_by_side.tell(rows, found, say)
    for kind, of in rows.items():
        console.print(report.bar(kind, report.parts(of, found.whole[kind]), max(found.whole.values())))
    picture = start.out / "report.png"
    side_by_side.draw(
        rows, f"spec-plugin quickstart: GRPO in {trainer.name} on a CPU, with the flag and without", picture
    )
    numbers = start.out / "report.json"
    numbers.write_text(json.dumps({"sums": asdict(found), "rows": rows}, indent=1))
    say(f"Picture: {picture}  numbers: {numbers}")


def watch(run: Run, trainer: Trainer, log: Path) -> list[report.Record]:
    """Follow the run with a live line; without a terminal, one line a step."""
    records: list[report.Record] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
        TimeElapsedColumn(),
    )
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        closing(run.follow()) as steps,
        ExitStack() as stack,
    ):
        task = progress.add_task("GRPO", total=run.steps, now="starting actor and vLLM: a minute or two")
        started = Event()
        Thread(target=tell_start, args=(log, started, progress, task), daemon=True).start()
        stack.callback(started.set)
        for step, metrics in steps:
            started.set()
            records.append(report.record(step, metrics, trainer))
            line = describe(records[-1])
            progress.update(task, completed=step, now=line)
            if not console.is_terminal:
                console.print(f"step {step}/{run.steps}: {line}", highlight=False)
    return records


def tell_start(log: Path, started: Event, progress: Progress, task: TaskID) -> None:
    """Show what the plugin says while actor and engines start, which takes a minute or two before the first step."""
    shown = ""
    while not started.wait(1.0):
        text = log.read_text(errors="replace") if log.exists() else ""
        said = [
            line.partition("spec-plugin: ")[2]
            for line in text.splitlines()
            if "INFO" in line and "spec-plugin: " in line
        ]
        if said and said[-1] != shown:
            shown = said[-1]
            progress.update(task, now=shown[:100])
            if not console.is_terminal:
                console.print(shown, highlight=False, markup=False)


def describe(row: report.Record) -> str:
    """One step in one line."""
    reward, acceptance = report.show(row["reward"], ".2f"), report.show(row["acceptance_length"], ".2f")
    return f"reward {reward} · acceptance length {acceptance} · step {report.show(row['step_s'], '.1f')} s"


def conclude(
    run: Run, trainer: Trainer, records: list[report.Record], seconds: float, parts: Mapping[str, float]
) -> None:
    """Print the table, the changes and where the time went, write picture and JSON."""
    kind = "plain" if run.plain else "speculative"
    console.print(report.table(records, f"GRPO in {trainer.name} with {kind} rollouts, step by step"))
    for name, (first, last) in report.summary(records).items():
        if first is not None or last is not None:
            words = f"{name.replace('_', ' ')}: first steps {report.show(first, '.2f')} → last steps"
            console.print(f"  {words} {report.show(last, '.2f')}", highlight=False)
    picture, numbers = run.out / "report.png", run.out / "report.json"
    report.write_picture(records, f"spec-plugin quickstart: GRPO in {trainer.name} on a CPU, {kind} rollouts", picture)
    settings: dict[str, Any] = {
        "trainer": trainer.name,
        "steps": run.steps,
        "plain": run.plain,
        "overrides": run.overrides,
        "seconds": seconds,
        "parts": parts,
    }
    report.write_json(records, settings, numbers)
    bars = {kind: parts}
    other = run.out.with_name(run.out.name.removesuffix("-plain") + "-plain" * (not run.plain)) / "report.json"
    with suppress(OSError, ValueError, KeyError):  # of a run before this one, if there is one of as many steps
        before = json.loads(other.read_text())["settings"]
        if other.parent != run.out and (before["trainer"], before["steps"]) == (trainer.name, run.steps):
            bars["plain" if before["plain"] else "speculative"] = before["parts"]
    longest = max(sum(of.values()) for of in bars.values())
    for name in sorted(bars):
        console.print(report.bar(name, bars[name], longest))
    console.print(f"{seconds / 60:.1f} minutes in all. Picture: {picture}  numbers: {numbers}", highlight=False)
    command = Path(sys.executable).with_name("spec-plugin")
    console.print(f"More of it, as a page: {command} report {run.out}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
