"""Does the draft learn in each deployment shape? Acceptance length by trainer step, on the conformance kit's tiny policy.

Real runs of the real trainer on a CPU; no times are measured. One line a step, as the trainer logs it.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

import click
from spec_plugin_conformance.driver import RunSettings
from spec_plugin_conformance.plugin import load_driver, shaped

#: drafts from the first step, and training that is long enough for a policy of 0.3M parameters
OPTIONS = {"serve": "always", "train_share": 0.5, "train_max_steps": 64, "self_test": False}


def acceptance(trainer: str, shape: str | None, steps: int) -> list[float]:
    """Acceptance length of each step; prints them as they come."""
    root = Path(tempfile.mkdtemp(prefix="spec-plugin-shapes-"))
    try:
        driver = shaped(load_driver(trainer), trainer, shape)(root / "driver")
        settings = RunSettings(root / "run", steps, options=OPTIONS)
        found = []
        with contextlib.closing(driver.launch(settings)) as run:
            for step, metrics in run:
                found.append(metrics[f"{driver.metric_prefix}spec/acceptance_length"])
                click.echo(f"{trainer} {shape or 'plain'} step {step}: {found[-1]:.2f}")
        return found
    finally:
        shutil.rmtree(root, ignore_errors=True)


@click.command(help=__doc__)
@click.option("--trainer", default="verl", show_default=True, help="Adapter, or module:Driver.")
@click.option("--shape", "shapes", multiple=True, help="Shape; may be repeated.  [default: all that the driver knows]")
@click.option("--steps", default=10, show_default=True, help="Trainer steps.")
def main(trainer: str, shapes: tuple[str, ...], steps: int) -> None:
    """Run each shape."""
    rows = [(shape, acceptance(trainer, shape, steps)) for shape in shapes or tuple(load_driver(trainer).shapes)]
    click.echo(f"\n| {trainer} | acceptance length at steps 1, 2, … | first above 2 |\n| --- | --- | ---: |")
    for shape, found in rows:
        above = next((str(i) for i, value in enumerate(found, 1) if value > 2), "none")
        click.echo(f"| {shape} | {', '.join(f'{value:.2f}' for value in found)} | {above} |")


if __name__ == "__main__":
    main()
