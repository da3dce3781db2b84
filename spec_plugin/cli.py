"""The ``spec-plugin`` command: looks at an installation and explains options and hooks. It starts and changes nothing."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spec_plugin import __version__
from spec_plugin.config import SpecConfig, describe_range, options_table
from spec_plugin.conformance.cli import conformance
from spec_plugin.doctor import Finding, Section, examine, hook_summaries, to_json, works

_MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "fail": ("FAIL", "bold red")}
_HELP = """Lossless speculative rollouts for RL trainers on vLLM.

A small draft model proposes tokens, the policy verifies them, and the draft is trained and refreshed inside the run.
The samples and the log-probs stay the policy's own. It is switched on with one flag of the trainer, and does nothing
without it. For verl:

\b
  actor_rollout_ref.model.external_lib=spec_plugin_verl

No draft checkpoint is needed. Every option has a default; set one like this:

\b
  +actor_rollout_ref.rollout.custom.spec.k=5

Examples:

\b
  spec-plugin doctor --target ~/models/Qwen3-8B     would this run work here?
  spec-plugin options                               all options, defaults and bounds
  spec-plugin conformance verl                      does the adapter keep the contract?
"""


@click.group(help=_HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="spec-plugin")
def main() -> None:
    """The group; its help text is ``_HELP``."""


@main.command()
@click.option("--target", type=click.Path(path_type=Path), help="Folder of the policy's checkpoint.")
@click.option("--draft", type=click.Path(path_type=Path), help="Folder of a draft checkpoint to start from.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def doctor(target: Path | None, draft: Path | None, as_json: bool) -> None:
    """Look at everything that a run needs; exit 1, with a fix for each line, if it would not work."""
    with contextlib.redirect_stdout(sys.stderr):  # libraries log to stdout while they are imported
        sections = examine(target, draft)
    if as_json:
        click.echo(to_json(sections))
    else:
        _print_report(sections)
    sys.exit(0 if works(sections) else 1)


def _print_report(sections: list[Section]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    for section in sections:
        console.print(Text(section.title, style="bold"))
        for finding in section.findings:
            console.print(_line(finding))
            if finding.fix:
                console.print(Text(f"       {'':<20} fix: {finding.fix}", style=_MARKS[finding.state][1]))
    failures = sum(f.state == "fail" for s in sections for f in s.findings)
    verdict = "everything that a run needs is here" if not failures else f"{failures} of these lines would stop a run"
    console.print(Text(verdict, style="bold"))


def _line(finding: Finding) -> Text:
    mark, style = _MARKS[finding.state]
    return Text.assemble("  ", (f"{mark:<4}", style), f" {finding.name:<20} {finding.detail}")


@main.command()
@click.option("--markdown", is_flag=True, help="As the Markdown table in the README.")
def options(markdown: bool) -> None:
    """Every option with its default, bounds and meaning."""
    if markdown:
        click.echo(options_table())
        return
    table = Table("option", "default", "allowed", "meaning", box=None, pad_edge=False)
    for name, field in SpecConfig.model_fields.items():
        default = "none" if field.default is None else str(field.default)
        table.add_row(*(Text(c) for c in (name, default, describe_range(name), field.description or "")))
    console = Console()
    console.print(table)
    console.print("\nverl: +actor_rollout_ref.rollout.custom.spec.<option>=<value>", highlight=False)


@main.command()
def hooks() -> None:
    """Every hook that a plugin may implement; spec_plugin/hookspecs.py has the details."""
    table = Table("hook", "when", box=None, pad_edge=False)
    for name, when in hook_summaries():
        table.add_row(Text(name), Text(when))
    Console().print(table)


main.add_command(conformance)


if __name__ == "__main__":
    main()
