"""The ``spec-plugin`` command: looks at an installation, judges a run before it starts, trains drafts, makes reports."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spec_plugin import __version__
from spec_plugin.api.config import described_options, options_table
from spec_plugin.api.diagnosis import INSTALL, PLATFORM, Diagnosis
from spec_plugin.api.errors import SpecPluginError
from spec_plugin.commands.check import find_model, judge_run, model_from
from spec_plugin.commands.check import to_json as judgement_to_json
from spec_plugin.commands.check import to_text as judgement_to_text
from spec_plugin.commands.doctor import Section, examine, hook_summaries, to_json, works
from spec_plugin.commands.terminal import Refused, echo, visible
from spec_plugin.plan.model_runner import Cluster
from spec_plugin.plan.text_files import write_whole

_WIDTH = 250  # of a table that is not printed to a terminal
_SHOWN = 300  # characters of an error that nobody expected
_MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "fail": ("FAIL", "bold red")}
_HELP = """Lossless speculative rollouts for RL trainers on vLLM.

A small draft model proposes tokens, the policy verifies them, and the draft is trained and refreshed inside the run.
The samples and the log-probs stay the policy's own. It is switched on with one flag of the trainer, and does nothing
without it:

\b
  verl      actor_rollout_ref.model.external_lib=spec_plugin_verl
  OpenRLHF  python -m spec_plugin_openrlhf … --spec.enable
  TRL       accelerate launch -m spec_plugin_trl train.py

No draft checkpoint is needed. Every option has a default; set one like this:

\b
  verl      +actor_rollout_ref.rollout.custom.spec.k=5
  OpenRLHF  --spec.k 5
  TRL       -m spec_plugin_trl --spec.k 5 train.py

Examples:

\b
  spec-plugin check verl -- <arguments>             would this run be accepted, and what would it do?
  spec-plugin doctor --target ~/models/Qwen3-8B     is everything here that a run needs?
  spec-plugin train --target DIR --prompts FILE --out DRAFT    a draft before the run
  spec-plugin export DRAFT --to sglang --out FOLDER            the same draft as another engine loads it
  spec-plugin project --model Qwen3-8B --card H100 …    what would the flag do on these cards?
  spec-plugin report RUN…                           what did it do? one page of HTML
  spec-plugin options                               all options, defaults and bounds
  spec-plugin conformance verl                      does the adapter keep the contract?
"""


#: entry points of commands of other distributions, each imported when it is asked for
_GROUP = "spec_plugin_commands"
#: of those that are ours the distribution, and its folder in a clone
_ELSEWHERE = {"conformance": ("spec-plugin-testing", "testing"), "project": ("spec-plugin-projection", "projection")}


class _Commands(click.Group):
    """Commands of other rooms beside our own; and trouble of this machine's, in one sentence.

    Such as no room for the output, or a folder that was removed while we stand in it.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Our commands and those of other distributions."""
        return sorted({*super().list_commands(ctx), *_ELSEWHERE, *metadata.entry_points(group=_GROUP).names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A command; one of another distribution is imported now, or says what to install."""
        own = super().get_command(ctx, cmd_name)
        if own is None and (found := [*metadata.entry_points(group=_GROUP, name=cmd_name)]):
            own = found[0].load()
        return own or (_missing(cmd_name) if cmd_name in _ELSEWHERE else None)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; whatever it raises becomes one sentence, and exit code 2."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit, BrokenPipeError):
            raise  # click's own business; of the last, whoever reads has gone
        except SpecPluginError as error:
            raise Refused(error) from error
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise Refused(f"{where}{error.strerror or error}: the command stopped there") from error
        except Exception as error:
            *_, last = traceback.walk_tb(error.__traceback__)
            place = f"{last[0].f_code.co_filename}:{last[1]}"
            raise Refused(
                f"{type(error).__name__}: {str(error)[:_SHOWN]} ({place}): spec-plugin did not expect this; please report it, "
                "with what you typed"
            ) from error


def _missing(name: str) -> click.Command:
    """In the place of a command whose distribution is not installed."""
    distribution, folder = _ELSEWHERE[name]
    how = f"{INSTALL}/{folder}"

    def refuse(arguments: tuple[str, ...]) -> None:
        raise Refused(f"spec-plugin {name} comes with {distribution}, which is not installed: {how}")

    anything = click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)
    settings = {"ignore_unknown_options": True}
    return click.Command(name, settings, refuse, [anything], help=f"Not installed: {how}.")


@click.group(
    cls=_Commands, help=_HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, prog_name="spec-plugin")
def main() -> None:
    """The group; its help text is ``_HELP``. A name that is no text, or not in this terminal's encoding, is printed escaped."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # of a stream whose file has been given away since it was opened
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")


_card_option = click.option(
    "--card", default="", help="Where it is to run: a GPU's name, or cpu; default: what this machine's vLLM is for."
)
_vllm_option = click.option(
    "--vllm", default="", help="vLLM's release there, such as 0.26; default: the one that is installed here."
)


@main.command()
@click.option("--target", type=click.Path(path_type=Path), help="Folder of the policy's checkpoint.")
@click.option(
    "--draft", type=click.Path(path_type=Path), help="Draft to start from: a folder, or OWNER/NAME of the hub."
)
@_card_option
@_vllm_option
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def doctor(target: Path | None, draft: Path | None, card: str, vllm: str, as_json: bool) -> None:
    """Look at everything that a run needs; exit 1, with a fix for each line, if it would not work.

    With --card and --vllm, "what an engine runs" is told of that card; all else is of what is installed here.
    """
    console, sections = Console(file=sys.stdout, soft_wrap=True, highlight=False), []
    with contextlib.redirect_stdout(sys.stderr):  # libraries log to stdout while they are imported
        for section in examine(target, draft, Cluster(card, vllm)):
            sections.append(section)
            if not as_json:
                _print_section(console, section)
    if as_json:
        echo(to_json(sections))
    else:
        _print_verdict(console, sections)
    sys.exit(0 if works(sections) else 1)


_CHECK_HELP = """Say in seconds whether a run would be accepted, what it would do, or what to set instead.

TRAINER is verl, openrlhf or trl (or another adapter's name); ARGUMENTS are what the trainer gets, or the whole command line.
The run is judged as if the flag were set, so it need not be there. Unless it is asked for a dry run, nothing is
started, changed or downloaded, and no GPU is needed; the trainer must be installed, since its own configuration is read.

\b
Examples:
  spec-plugin check verl -- actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.rollout.name=vllm \\
      +actor_rollout_ref.rollout.custom.spec.k=5
  spec-plugin check verl --model-config qwen3.json -- python -m verl.trainer.main_ppo …
  spec-plugin check verl --card H100 --vllm 0.26 -- …          for a cluster, from a laptop
  spec-plugin check openrlhf -- --actor.model_name_or_path Qwen/Qwen3-8B --vllm.num_engines 4 --spec.k 5
  spec-plugin check openrlhf --json -- ray job submit -- python -m openrlhf.cli.train_ppo_ray …
  spec-plugin check trl -- --spec.dry_run accelerate launch train.py …   (runs the script until it makes the trainer)
  spec-plugin check trl -- --spec.k 5 trl grpo --model_name_or_path Qwen/Qwen3-8B --use_vllm …

It lists everything that stands in the way, each with the option, its value and what to set instead; the run itself
refuses with the same words. A model that is not on this disk is listed as not checked, and the rest is judged.

Exit code: 0 accepted, 1 refused, 2 not to be judged.
"""


@main.command(help=_CHECK_HELP, context_settings={"ignore_unknown_options": True})
@click.option("--model-config", type=click.Path(path_type=Path), help="A config.json that stands in for the model's.")
@_card_option
@_vllm_option
@click.option("--json", "as_json", is_flag=True, help="Print the judgement as JSON.")
@click.argument("trainer")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def check(
    trainer: str, arguments: tuple[str, ...], model_config: Path | None, card: str, vllm: str, as_json: bool
) -> None:
    """Judge one run; the help text is ``_CHECK_HELP``."""
    find = model_from(model_config) if model_config else find_model
    judgement = judge_run(trainer, arguments, find, Cluster(card, vllm))
    echo(judgement_to_json(judgement) if as_json else "\n".join(judgement_to_text(judgement)))
    sys.exit(0 if judgement.accepted else 1)


_TRAIN_HELP = """Train a draft for a policy before a run, from the policy's own rollouts.

A run needs none: it trains a new draft from its first step on. One that was trained before is served from the first step.

\b
  spec-plugin train --target DIR --prompts train.parquet --out DRAFT
  spec-plugin train --target DIR --rollouts runs/rollouts/ --out DRAFT      what verl has dumped, or your own .jsonl

\b
What happens:
  1. vLLM samples --responses responses to the prompts (or they are read: --rollouts).
  2. Hidden states are captured in the policy's forward passes, and the draft is trained on them, with the same code as
     in a run.
  3. vLLM serves the draft on prompts that it was not trained on. Predicted and measured acceptance are printed.

Then in the run: spec.draft=DRAFT. If it is killed, the same command resumes. --prompts is a .json list, .jsonl or
.parquet of texts (taken as they are), chat messages, or rows with a "prompt". --rollouts takes rows with "prompt" and
"response", or a folder of verl's trainer.rollout_data_dir (which lacks special tokens).
"""


@main.command(help=_TRAIN_HELP, context_settings={"show_default": True})
@click.option("--target", type=click.Path(path_type=Path), required=True, help="Folder of the policy's checkpoint.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the draft; must not exist.")
@click.option("--prompts", type=click.Path(path_type=Path), help="File of prompts to sample from.")
@click.option("--rollouts", type=click.Path(path_type=Path), multiple=True, help="File or folder; may be repeated.")
@click.option("--responses", default=1024, type=click.IntRange(16), help="Rollouts to sample.")
@click.option("--tokens", default=512, type=click.IntRange(8), help="Most tokens of a response.")
@click.option("--temperature", default=1.0, type=click.FloatRange(0.0, min_open=True), help="As in the run to come.")
@click.option("--steps", default=800, type=click.IntRange(1), help="Optimizer steps.")
@click.option("--k", default=8, type=click.IntRange(1, 16), help="Most tokens to draft in the run to come.")
@click.option("--draft", help="Draft to start from, a folder or OWNER/NAME of the hub; default: a new one.")
@click.option(
    "--draft-vocab-size", type=click.IntRange(32), help="Prune the draft's vocabulary to the most frequent tokens."
)
@click.option("--train-tokens", type=click.IntRange(32), help="Tokens of an optimizer step; default: as in a run.")
@click.option(
    "--gpu-memory-utilization", default=0.85, type=click.FloatRange(0.05, 1.0), help="vLLM's, while it samples."
)
@click.option("--seed", default=0, help="Of sampling and training.")
def train(**options: Any) -> None:
    """Train a draft offline; the help text is ``_TRAIN_HELP``."""
    from spec_plugin.commands.train import PretrainSettings, pretrain
    from spec_plugin.step_cost.chances import tokens_per_step

    settings = PretrainSettings(**options)
    outcome = pretrain(settings)
    for name, chances in (("predicted", outcome.predicted), ("measured", outcome.measured)):
        sizes = sorted({1, min(3, settings.k), settings.k})
        echo(f"tokens a step, {name}: " + ", ".join(f"k={k}: {tokens_per_step(chances, k):.2f}" for k in sizes))
    echo(f"the draft is in {settings.out}; in a run: spec.draft={settings.out.absolute()}")


_REPORT_HELP = """Show what a run did, as one page of HTML that opens anywhere.

RUN is a folder of a run, or a file: JSON lines of steps (verl's file logger), the trainer_state.json of TRL's checkpoints, or
TensorBoard's event files. Several runs are shown side by side and compared with the first plain one. Console logs are not read.

\b
Examples:
  spec-plugin report runs/mine
  spec-plugin report plain/metrics.jsonl flag/ --out compare.html
  spec-plugin report output_dir                     of TRL: the newest checkpoint in it has all steps
  spec-plugin report tensorboard_dir                of OpenRLHF, with --logger.tensorboard_dir tensorboard_dir
  spec-plugin report metrics.jsonl --json | jq '.runs[0].findings'

It says when the engines drafted and why not, the acceptance, the speed-up, what it cost, whether log-probs agreed, and what
looks wrong. Nothing but the page is written.
"""


@main.command(help=_REPORT_HELP)
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN…")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="The page; default: spec-report.html here."
)
@click.option("--base", help="Name of the run that the others are compared with; default: the first plain one.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON; no page, unless --out is given.")
def report(runs: tuple[Path, ...], out: Path | None, base: str | None, as_json: bool) -> None:
    """Report on runs; the help text is ``_REPORT_HELP``."""
    from spec_plugin.commands.report import make_report, to_html, to_json, to_text

    page = out or (None if as_json else Path("spec-report.html"))
    made = make_report(runs, base)
    if page:
        write_whole(page, to_html(made))
    echo(to_json(made) if as_json else "\n".join(to_text(made)))
    if page and not as_json:
        echo(f"the page: {page.absolute()}")


def _print_section(console: Console, section: Section) -> None:
    console.print(Text(visible(section.title), style="bold"))
    for finding in section.findings:
        console.print(_line(finding))
        if finding.fix:
            console.print(Text(visible(f"       {'':<20} fix: {finding.fix}"), style=_MARKS[finding.state][1]))


def _print_verdict(console: Console, sections: Sequence[Section]) -> None:
    failures = sum(f.state == "fail" for s in sections for f in s.findings)
    started = [f.name for s in sections for f in s.findings if f.name.endswith(PLATFORM) and f.fix]
    verdict = f"{failures} of these lines would stop a run: see each one's fix"
    if not failures:
        verdict = "a run has everything that it needs"
        verdict += f", if it is started as the fix of {' and '.join(started)} says" if started else ""
    console.print(Text(verdict, style="bold"))


def _line(finding: Diagnosis) -> Text:
    mark, style = _MARKS[finding.state]
    return Text.assemble("  ", (f"{mark:<4}", style), visible(f" {finding.name:<20} {finding.detail}"))


@main.command()
@click.option("--markdown", is_flag=True, help="As the Markdown table in docs/reference/options.md.")
def options(markdown: bool) -> None:
    """Every option with its default, bounds and meaning."""
    if markdown:
        echo(options_table())
        return
    _print_table(("option", "default", "allowed", "meaning"), described_options())
    echo("\nverl: +actor_rollout_ref.rollout.custom.spec.<option>=<value>")
    echo("OpenRLHF: --spec.<option> <value>\nTRL: -m spec_plugin_trl --spec.<option> <value> train.py")


@main.command()
def hooks() -> None:
    """Every hook that a plugin may implement; spec_plugin/api/hookspecs.py has the details."""
    _print_table(("hook", "when"), hook_summaries())


def _print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column(titles[0], no_wrap=True, min_width=max(len(row[0]) for row in rows))
    for title in titles[1:]:
        table.add_column(title)
    for row in rows:
        table.add_row(*map(Text, row))
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)


if __name__ == "__main__":
    main()
