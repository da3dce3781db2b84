"""All benchmarks, one process after the other: an engine keeps its settings until its process ends."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import click

HERE = Path(__file__).resolve().parent
NAMES = ("speedup", "control", "methods", "learning", "off_cost", "refresh", "harvest", "overheads", "tokens", "front")

HELP = """Run the benchmarks, each in a process of its own. OPTIONS after -- go to every one of them.

\b
  speedup    rollouts with a trained draft against a plain engine
  off_cost   the flag on with speculation off, against a plain engine
  refresh    replacing the draft in a running engine
  control    the break-even controller against every fixed k
  methods    every drafting method on one target, and in one GRPO run
  learning   how a draft starts, whether it trains along the run, and k
  overheads  harvest, training, refresh, provenance at growing sizes
  harvest    copying hidden states out of the log-prob pass
  tokens     judging the log-probs of a step, up to a million tokens
  front      what log-probs and bookkeeping cost the engine's front end
What their numbers mean is in README.md beside this file. control alone took
half an hour to an hour a dtype on two cores. training.py, long_run.py and async_run.py, which compare whole runs of a trainer,
and curves.py, the learning curves of two optimizers, are run by themselves, and so are projection_cpu.py and projection.py, which
hold `spec-plugin project` against numbers that are known.
"""


@click.command(help=HELP, context_settings={"max_content_width": 120, "show_default": True})
@click.option("--only", multiple=True, type=click.Choice(NAMES), help="Run this one; may be repeated.")
@click.option("--quick", is_flag=True, help="Few rounds: to see that everything runs, not to quote.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def main(only: tuple[str, ...], quick: bool, options: tuple[str, ...]) -> None:
    """Run them; the exit status is that of the first that failed."""
    failed = 0
    for name in only or NAMES:
        began = time.monotonic()
        click.secho(f"\n== {name}", bold=True)
        done = subprocess.run(
            [sys.executable, str(HERE / f"{name}.py"), *(quick_options(name) if quick else ()), *options]
        )
        failed = failed or done.returncode
        click.echo(
            f"{name}: {time.monotonic() - began:.0f} s" + (f", exit status {done.returncode}" * bool(done.returncode))
        )
    sys.exit(failed)


def quick_options(name: str) -> tuple[str, ...]:
    """Options of one benchmark for a quick look."""
    few = {
        "refresh": ("--refreshes", "4"),
        "front": ("--requests", "4", "--tokens", "64"),
        "methods": ("--rounds", "1", "--steps", "2", "--batch", "4"),
        "learning": ("--rounds", "1", "--steps", "2", "--at", "0", "--at", "2", "--start-steps", "40"),
    }
    return few.get(name, ("--rounds", "2"))


if __name__ == "__main__":
    main()
