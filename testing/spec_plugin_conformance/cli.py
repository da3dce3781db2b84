"""The ``spec-plugin conformance`` command."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from spec_plugin_conformance.targets import tiny_targets

_HELP = f"""Test an adapter: does it keep the contract, on its real trainer and a real engine?

NAME is an installed adapter (an entry point of the group spec_plugin_conformance), or module:DriverClass of one that you
are writing. The kit starts the trainer a few times on a tiny policy, writes down what every hook carries, and judges it:
are the samples and log-probs the target's, does the engine hold the published draft, is the policy bit for bit what it
would be without the flag, does training survive every fault of the draft. A CPU is enough; it takes minutes.

Exit code 0: every check is supported, refused by the adapter with a reason, or known to fail for the sake of another.

Examples:

\b
  spec-plugin conformance verl
  spec-plugin conformance verl --shape tp2        two tensor parallel ranks in the engine, two in the actor
  spec-plugin conformance verl --target qwen3_moe        a policy of another family
  spec-plugin conformance verl --spec method=draft_model       another option of the plugin, in every run with the flag
  spec-plugin conformance verl -k "off_is_off or hooks_fire_in_order"
  spec-plugin conformance my_adapter.driver:Driver --keep /tmp/kit     look at logs and traces afterwards
  spec-plugin conformance verl --badge conformance.md --junit conformance.xml

Families for --target: {", ".join(tiny_targets())}.
"""


@click.command(help=_HELP)
@click.argument("name")
@click.option("--shape", help="Deployment shape of the runs, such as tp2; an unknown one lists those that NAME knows.")
@click.option("--target", "family", metavar="FAMILY", help="Family of the tiny policy, by its model_type.")
@click.option(
    "--spec", "options", multiple=True, metavar="NAME=VALUE", help="An option of the plugin; may be repeated."
)
@click.option("--badge", type=click.Path(path_type=Path), help="Write a Markdown table for the adapter's README.")
@click.option("--junit", type=click.Path(path_type=Path), help="Write JUnit XML for a CI.")
@click.option(
    "-k", "expression", help="Only the checks that match, as in pytest; runs that nobody needs are not started."
)
@click.option(
    "--keep", type=click.Path(path_type=Path), help="Work in this new folder, and keep logs, traces, checkpoints."
)
def conformance(
    name: str,
    shape: str | None,
    family: str | None,
    options: tuple[str, ...],
    badge: Path | None,
    junit: Path | None,
    expression: str | None,
    keep: Path | None,
) -> None:
    """Run the kit through pytest, and exit with its code."""
    import pytest

    from spec_plugin_conformance.plugin import CHECKS_FILE

    arguments = ["-p", "spec_plugin_conformance", "--adapter", name, str(CHECKS_FILE)]
    # the folder that we are called in may belong to a project with pytest settings of its own
    arguments += ["-o", "addopts=", "--noconftest", "-p", "no:cacheprovider", "--tb=short", "-q"]
    arguments += ["--rootdir", str(CHECKS_FILE.parent), "-W", "ignore:Module already imported so cannot be rewritten"]
    for option, value in (
        ("--kit-shape", shape),
        ("--kit-target", family),
        ("--kit-badge", badge),
        ("--junitxml", junit),
        ("-k", expression),
        ("--kit-keep", keep),
    ):
        arguments += [option, str(value)] if value else []
    for option in options:
        arguments += ["--kit-spec", option]
    sys.exit(pytest.main(arguments))
