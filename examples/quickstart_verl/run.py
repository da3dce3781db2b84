"""The quickstart: GRPO in verl on this CPU, with one flag for speculative rollouts that learn as the policy learns."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers.utils.logging import disable_progress_bar

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from examples.quickstart_verl import report  # noqa: E402
from examples.quickstart_verl.data import build_data  # noqa: E402
from examples.quickstart_verl.launch import PLUGIN_FLAG, Run, RunFailed, follow  # noqa: E402
from examples.quickstart_verl.policy import PolicySettings, cached_policy  # noqa: E402

HELP = f"""Train a tiny policy with GRPO in verl, on this CPU, with speculative rollouts.

\b
What happens:
  1. A 1.3M-parameter Qwen3 is taught column addition from examples with slips in them, so that it gets about
     half of the sums right (a minute; cached under .cache/quickstart).
  2. verl starts: a real FSDP actor, a real vLLM engine, Ray. The plugin is this one flag:
       {PLUGIN_FLAG}
  3. In each GRPO step the engine drafts with an EAGLE-3 head that did not exist before the run: it is trained
     on what the actor computes anyway, and refreshed in the engine after each weight sync.
  4. A table, a picture and a JSON file show reward, acceptance length, draft loss and times.

\b
OVERRIDES are passed on to verl, for example:
  actor_rollout_ref.rollout.n=4                   verl's own settings
  +actor_rollout_ref.rollout.custom.spec.k=5      the plugin's options
  +actor_rollout_ref.rollout.custom.spec.serve=always
"""

console = Console(width=None if sys.stdout.isatty() else 110)


@click.command(help=HELP, context_settings={"ignore_unknown_options": True, "max_content_width": 120})
@click.option("--steps", default=30, show_default=True, type=click.IntRange(1), help="GRPO steps.")
@click.option("--plain", is_flag=True, help="The same run without the flag, for comparison.")
@click.option("--fresh", is_flag=True, help="Teach the policy again instead of taking it from the cache.")
@click.option("--out", default=Path("runs/quickstart"), show_default=True, type=click.Path(path_type=Path))
@click.option("--cache", default=ROOT / ".cache" / "quickstart", type=click.Path(path_type=Path), hidden=True)
@click.argument("overrides", nargs=-1)
def main(steps: int, plain: bool, fresh: bool, out: Path, cache: Path, overrides: tuple[str, ...]) -> None:
    """Build policy and data, run verl, report."""
    begin = time.monotonic()
    out = out.absolute()
    settings = PolicySettings()
    disable_progress_bar()
    if fresh:
        shutil.rmtree(cache, ignore_errors=True)
    policy = cached_policy(cache, settings)
    train_file, val_file = build_data(cache / f"data-{settings.digest}", settings)
    run = Run(policy, train_file, val_file, out, steps, plain, overrides)
    console.print(
        f"{'plain run, no flag' if plain else PLUGIN_FLAG}\nall output of verl: {run.log_file}", highlight=False
    )
    try:
        records = watch(run)
    except RunFailed as error:
        console.print(
            f"[red]the run failed[/red]: {error}\nthe whole log: {run.log_file}", highlight=False, markup=True
        )
        sys.exit(1)
    conclude(run, records, time.monotonic() - begin)


def watch(run: Run) -> list[report.Record]:
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
        closing(follow(run)) as steps,
    ):
        task = progress.add_task("GRPO", total=run.steps, now="starting Ray, FSDP and vLLM: a minute or two")
        for step, metrics in steps:
            records.append(report.record(step, metrics))
            line = describe(records[-1])
            progress.update(task, completed=step, now=line)
            if not console.is_terminal:
                console.print(f"step {step}/{run.steps}: {line}", highlight=False)
    return records


def describe(row: report.Record) -> str:
    """One step in one line."""
    reward, acceptance = report.show(row["reward"], ".2f"), report.show(row["acceptance_length"], ".2f")
    return f"reward {reward} · acceptance length {acceptance} · step {report.show(row['step_s'], '.1f')} s"


def conclude(run: Run, records: list[report.Record], seconds: float) -> None:
    """Print the table and the changes, write picture and JSON."""
    kind = "plain" if run.plain else "speculative"
    console.print(report.table(records, f"GRPO with {kind} rollouts, step by step"))
    for name, (first, last) in report.summary(records).items():
        if first is not None or last is not None:
            words = f"{name.replace('_', ' ')}: first steps {report.show(first, '.2f')} → last steps"
            console.print(f"  {words} {report.show(last, '.2f')}", highlight=False)
    picture, numbers = run.out / "report.png", run.out / "report.json"
    report.write_picture(records, f"spec-plugin quickstart: GRPO on a CPU, {kind} rollouts", picture)
    settings: dict[str, Any] = {"steps": run.steps, "plain": run.plain, "overrides": run.overrides, "seconds": seconds}
    report.write_json(records, settings, numbers)
    console.print(f"{seconds / 60:.1f} minutes in all. Picture: {picture}  numbers: {numbers}", highlight=False)


if __name__ == "__main__":
    main()
