"""Every drafting method on one target, and in one GRPO run: what is accepted, what that gains, and what it costs."""

from __future__ import annotations

import shutil
import sys
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
    read_results,
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
none     nothing is measured: one file and one picture of what is --known.
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
@click.option("--part", "parts", multiple=True, type=click.Choice([*PARTS, "none"]), default=("engine", "run"))
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
    help="Results of an earlier call, which are shown beside what is measured now; may be repeated.",
)
@click.option("--threads", type=int, help="Compute threads; default: all cores.")
@click.option("--out", default=common.RESULTS, type=click.Path(path_type=Path), help="Folder of JSON and PNG.")
def main(**options: Any) -> None:
    """Prepare, measure, report."""
    out, known = options.pop("out"), options.pop("known")
    common.prepare_process(options["threads"])
    where = common.environment("cpu")
    found = read_results(known)
    found.run = {name: found.run[name] for name in METHODS if name in found.run}
    content = vars(found)
    file = common.write_results("methods", options, content, where, out)
    for part in (p for p in PARTS if p in options["parts"]):
        engines = Engines(options)
        for name in options["methods"]:
            if part == "engine":
                found.engine += measure(subject_of(name, options), engines, options)
                report_cells(found.engine)
            elif part == "control":
                found.control += control(subject_of(name, options), engines, options)
                report_controlled(found.control)
            else:
                found.run[name] = grpo(name, options["steps"], out)
                found.sources.pop(f"run {name}", None)
            file = common.write_results("methods", options, content, where, out)
        engines.close()
    if found.run:
        report_runs(found.run)
    if found.engine and found.run:
        write_picture(found.engine, found.run, file.with_suffix(".png"))
        say(f"picture: {file.with_suffix('.png')}")


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
