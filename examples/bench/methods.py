"""Every drafting method on one target, and in one GRPO run: what is accepted, what that gains, and what it costs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
# so that this file runs by path, from anywhere; less its own folder, where numba (for ngram) would find our coverage.py for its
sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p).resolve() != Path(__file__).resolve().parent)]

from examples.bench import common  # noqa: E402
from examples.bench.common import say  # noqa: E402
from examples.bench.methods_engines import Engines, control, measure, subject_of  # noqa: E402
from examples.bench.methods_report import (  # noqa: E402
    Cell,
    Controlled,
    report_cells,
    report_controlled,
    report_runs,
    write_picture,
)
from examples.quickstart import report as quickstart  # noqa: E402
from examples.quickstart.policy import QUICKSTART, cached_policy, policy_folder  # noqa: E402
from examples.quickstart.trainers import TRAINERS, Start  # noqa: E402

HELP = """Compare the drafting methods.

\b
engine   each method's engine against one without spec-plugin, in turn, on the width-padded target, a draft trained by our own
         loop where there is one; k fixed. "seen before": suffix, with four rollouts of each prompt in its memory.
control  the same engines under the plugin's own controller, which is told nothing of the draft: --phases phases, the first of
         them included; each prompt comes twice.
run      the quickstart's GRPO run in verl with each method, from a newborn draft, the controller deciding; on 24 prompts, so
         that each comes back every second step.
"""

#: those on the same target one after the other: they share the engine that they are compared with
METHODS = ("eagle3", "draft_model", "suffix", "ngram", "mtp")
PARTS = ("engine", "control", "run")
#: of a run: twice as many as a step takes
PROMPTS = 24
_SPEC = "+actor_rollout_ref.rollout.custom.spec."


@click.command(help=HELP, context_settings={"max_content_width": 120, "show_default": True})
@click.option(
    "--method", "methods", multiple=True, type=click.Choice(METHODS), default=METHODS, help="May be repeated."
)
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), default=("engine", "run"))
@click.option("--width", default=32768, help="Units of the padded MLPs (32768: 101M parameters).")
@click.option("--k", "ks", multiple=True, type=int, default=(3, 8), help="Drafted tokens; may be repeated.")
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8, 32), help="Batch size; may be repeated.")
@click.option("--rounds", default=3, help="Rounds that count; a short one more warms up.")
@click.option("--phases", default=10, help="Phases under the controller.")
@click.option("--seats", default=64, help="Most requests at once in the engines.")
@click.option("--tokens", default=48, help="Tokens per request.")
@click.option("--steps", default=8, help="GRPO steps of each run.")
@click.option("--rollouts", default=500, help="Rollouts that a draft is trained on.")
@click.option("--train-steps", default=300, help="Optimizer steps of draft training.")
@click.option(
    "--known",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    help="Results of an earlier call, whose runs are shown beside what is measured now; may be repeated.",
)
@click.option("--threads", type=int, help="Compute threads; default: all cores.")
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of JSON and PNG.")
def main(**options: Any) -> None:
    """Prepare, measure, report."""
    out, known = options.pop("out"), options.pop("known")
    common.prepare_process(options["threads"])
    where = common.environment("cpu")
    cells: list[Cell] = []
    controlled: list[Controlled] = []
    runs, sources = read_runs(known)
    content: dict[str, Any] = {"engine": cells, "control": controlled, "run": runs, "run_from": sources}
    for part in PARTS:
        if part not in options["parts"]:
            continue
        engines = Engines(options)
        for name in options["methods"]:
            if part == "engine":
                cells += measure(subject_of(name, options), engines, options)
                report_cells(cells)
            elif part == "control":
                controlled += control(subject_of(name, options), engines, options)
                report_controlled(controlled)
            else:
                runs[name] = grpo(name, options["steps"], out)
                sources.pop(name, None)
            file = common.write_results("methods", options, content, where, out)
        engines.close()
    if runs:
        report_runs(runs)
    if cells and runs:
        write_picture(cells, runs, file.with_suffix(".png"))
        say(f"picture: {file.with_suffix('.png')}")


def read_runs(files: Sequence[Path]) -> tuple[dict[str, list[quickstart.Record]], dict[str, str]]:
    """The runs in earlier results, and in which file each was; of a method that is in several, the last one's."""
    runs: dict[str, list[quickstart.Record]] = {}
    sources: dict[str, str] = {}
    for file in files:
        found: Mapping[str, list[quickstart.Record]] = json.loads(file.read_text())["results"]["run"]
        runs |= found
        sources |= dict.fromkeys(found, file.name)
    return {name: runs[name] for name in METHODS if name in runs}, sources


# ------------------------------------------------------------------------------------------------ runs


def grpo(name: str, steps: int, out: Path) -> list[quickstart.Record]:
    """The quickstart's run in verl with this method."""
    settings = replace(QUICKSTART, family="mimo" if name == "mtp" else "qwen3")
    cache = common.CACHE.parent / "quickstart"
    cached_policy(cache, settings)
    folder = out / f"methods-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    start = Start(
        policy_folder(cache, settings),
        cache / f"data-{settings.digest}",
        settings,
        folder,
        steps,
        False,
        (f"{_SPEC}method={name}", f"data.train_max_samples={PROMPTS}"),
    )
    say(f"a GRPO run of {steps} steps with {name}: {folder}")
    trainer = TRAINERS["verl"]
    run = trainer.run(start)
    return [quickstart.record(step, metrics, trainer) for step, metrics in run.follow()]


if __name__ == "__main__":
    main()
