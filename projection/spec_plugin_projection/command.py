"""The command line of ``spec-plugin project``: reads the options and prints the projection."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import SpecConfigError, SpecPluginError
from spec_plugin.commands.terminal import Refused, echo, visible
from spec_plugin.plan.model_runner import A_TRAINED_DRAFT, Cluster
from spec_plugin.step_cost.model import CostModel
from spec_plugin_projection.evidence import read_calibration, read_run
from spec_plugin_projection.hardware import find_card
from spec_plugin_projection.lengths import Lengths, from_file, lognormal, percentiles
from spec_plugin_projection.measured import Measured, against_data_sheet, calibrated
from spec_plugin_projection.picture import write_picture
from spec_plugin_projection.projecting import FAR, Overrides, Question, check_acceptance
from spec_plugin_projection.projecting import project as answer_to
from spec_plugin_projection.roofline import Deployment
from spec_plugin_projection.shapes import find_model
from spec_plugin_projection.table import LEGEND, limitations, question_lines, rows_table, runner_lines, sources, to_json

_HELP = """What would the flag do for this model on these GPUs? A projection, with ranges and sources.

\b
  spec-plugin project --model Qwen3-8B --card H100 --gpus 8 --batch 512 --mean 3000 --acceptance 3=2.8
  spec-plugin project --model Qwen3-235B-A22B --card GB200 --gpus 512 --tp 8 --dtype fp8 --batch 4096 --mean 8000 \\
      --longest 32768 --acceptance 3=3 --out picture.png
  spec-plugin project … --from runs/quickstart/verl      that run's measurements replace the assumptions: its
      acceptance always, its times if it ran this model on these GPUs

A step of the engine is a roofline from the model's config.json and the GPU's data sheet; each response of a rollout is
simulated until the slowest engine has finished; log-probs and training are rooflines as well. Nothing is started.
"""


_WIDTH = 120  # of a table that is not printed to a terminal
_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0}


@click.command(name="project", help=_HELP, context_settings={"show_default": True})
@click.option("--model", required=True, help="A known name, or a folder with a config.json.")
@click.option("--card", required=True, help="GPU, for example H100.")
@click.option("--gpus", default=8, help="GPUs that generate.")
@click.option("--tp", default=1, help="GPUs of one engine (tensor parallel).")
@click.option("--ep", default=1, help="GPUs that share the experts (expert parallel).")
@click.option("--batch", default=1024, help="Responses in a trainer step.")
@click.option("--mean", default=4096.0, help="Mean tokens of a response.")
@click.option("--longest", default=16384.0, help="Tokens at which a response is cut off.")
@click.option(
    "--lengths", help="Instead of mean and longest: percentiles (50=3000,99=15000) or a file, one length a line."
)
@click.option("--prompt", default=512, help="Tokens in a prompt.")
@click.option("--group", default=8, help="Responses to one prompt.")
@click.option(
    "--acceptance", multiple=True, help="K=LENGTH: acceptance length with K drafted tokens; repeat it, or 3=2.8,5=3.2."
)
@click.option(
    "--k", "ks", multiple=True, type=int, default=(1, 3, 5, 7), help="Tokens drafted in a step; may be repeated."
)
@click.option("--dtype", default="bf16", type=click.Choice(list(_BYTES)), help="Of the engine's weights.")
@click.option("--kv-dtype", default="bf16", type=click.Choice(list(_BYTES)), help="Of its KV cache.")
@click.option("--vllm", default="", help="vLLM's release there, such as 0.26; default: the one that is installed here.")
@click.option("--seats", default=256, help="Most requests of one engine at once (max_num_seqs).")
@click.option("--lag", default=0, help="Policy versions that rollouts are ahead; 0: synchronous.")
@click.option("--train-gpus", type=int, help="GPUs that train, if they are not those that generate.")
@click.option("--logprob-passes", default=1, help="Log-prob passes in a step; 2 with a reference model.")
@click.option(
    "--draft-share",
    type=float,
    help="Fraction of a plain step for draft training; default: train_share.",
)
@click.option(
    "--from",
    "run",
    type=click.Path(path_type=Path),
    help="A run with the flag, to measure from: a folder or file that `spec-plugin report` reads.",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    help="What a run's start-up measured: spec_plugin/calibration.json in its checkpoints.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Write a picture: speed-up against k and batch.")
@click.option("--json", "as_json", is_flag=True, help="Print numbers for programs.")
def project(**options: Any) -> None:
    """Project one deployment; the help text is ``_HELP``."""
    try:
        question, known = read(options)
        answer = answer_to(question, known)
        if options["out"]:
            write_picture(question, known, options["out"])
    except SpecPluginError as error:
        raise Refused(error) from error
    if options["as_json"]:
        echo(json.dumps(to_json(question, answer), indent=1))
        return
    engine = () if known.cost is not None else runner_lines(_cluster(options))
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    for title, lines in (
        ("deployment", (*question_lines(question, answer, known.cost is not None), *engine)),
        ("", ()),
        ("sources", sources(question, answer.measured, known.cost is not None)),
        ("not covered", limitations(question)),
    ):
        if not title:
            console.print(rows_table(question, answer))
            console.print(f"  {LEGEND}", markup=False)
            continue
        console.print(f"[bold]{title}[/bold]")
        for line in lines:
            console.print(f"  {visible(line)}", markup=False)


def read(options: Mapping[str, Any]) -> tuple[Question, Overrides]:
    """The question, and what is known beside it.

    Raises:
        SpecConfigError: naming the option that cannot be.
    """
    measured = read_run(options["run"]) if options["run"] else Measured()
    given = parse_acceptance(options["acceptance"])
    if given:
        check_acceptance(given)
    share = SpecConfig.parse({}).train_share if options["draft_share"] is None else options["draft_share"]
    if not 0 <= share <= 1:
        raise SpecConfigError(f"--draft-share {share:g}: from 0 to 1")
    deployment = Deployment(
        find_model(options["model"]),
        find_card(options["card"]),
        options["tp"],
        options["ep"],
        _BYTES[options["dtype"]],
        _BYTES[options["kv_dtype"]],
    )
    question = Question(
        deployment=deployment,
        gpus=options["gpus"],
        batch=options["batch"],
        lengths=_lengths(options),
        acceptance=given or measured.acceptance,
        ks=tuple(dict.fromkeys(options["ks"])),
        prompt=options["prompt"],
        group=options["group"],
        seats=options["seats"],
        lag=options["lag"],
        train_gpus=options["train_gpus"],
        logprob_passes=options["logprob_passes"],
        draft_share=share,
        full_graphs=_cluster(options).runner_of(A_TRAINED_DRAFT).v2,
    )
    deployment.cache_tokens()  # does it fit at all
    if given:
        measured = replace(measured, acceptance={})
    cost = _calibrated(options["calibration"], deployment) if options["calibration"] else None
    return question, Overrides(cost=cost, measured=measured)


def _cluster(options: Mapping[str, Any]) -> Cluster:
    return Cluster(find_card(options["card"]).name, options["vllm"])


def _calibrated(file: Path, deployment: Deployment) -> CostModel:
    """The cost model of a calibration, which names neither model nor card.

    Raises:
        SpecConfigError: if its steps cannot be those of this deployment.
    """
    steps = read_calibration(file)
    cost = calibrated(steps)
    if cost.problem is not None:
        raise SpecConfigError(f"--calibration {file}: {cost.problem}")
    if not 1 / FAR <= (times := against_data_sheet(steps, deployment)) <= FAR:
        d = deployment
        raise SpecConfigError(
            f"--calibration {file}: its steps take {times:.2g} times what those of {d.model.name} on {d.tp} {d.card.name} take "
            "by the data sheet, so they are another model's or machine's: give --model and --card of the run that it is from"
        )
    return cost


def parse_acceptance(texts: Sequence[str]) -> dict[int, float]:
    """``3=2.8,5=3.2`` as a mapping.

    Raises:
        SpecConfigError: if one is not of that form.
    """
    found: dict[int, float] = {}
    for text in ",".join(texts).split(",") if texts else ():
        k, _, length = text.partition("=")
        try:
            drafted, tokens = int(k), float(length)
        except ValueError as error:
            raise SpecConfigError(f"--acceptance {text}: give K=TOKENS, for example 3=2.8") from error
        if drafted in found:
            raise SpecConfigError(f"--acceptance {text}: k={drafted} was given {found[drafted]:g} tokens before")
        found[drafted] = tokens
    return found


def _lengths(options: Mapping[str, Any]) -> Lengths:
    given: str | None = options["lengths"]
    if given is None:
        return lognormal(options["mean"], options["longest"])
    try:
        points = {float(p): float(v) for p, _, v in (text.partition("=") for text in given.split(","))}
    except ValueError as error:
        if "=" not in given or os.path.exists(given):  # a folder's name may have one
            return from_file(Path(given))
        raise SpecConfigError(f"--lengths {given}: give PERCENTILE=TOKENS,… or a file") from error
    return percentiles(points)
