"""A picture of the projected speed-up against k, and against the batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from spec_plugin.api.errors import SpecConfigError
from spec_plugin_projection.projecting import MOST_RESPONSES, Overrides, Projection, Question, project

#: batches that are shown, as multiples of the one that is asked for
_BATCHES = (1 / 16, 1 / 4, 1, 4, 16)
_KS = (1, 2, 3, 4, 5, 6, 7, 8)


def write_picture(question: Question, known: Overrides, file: Path) -> None:
    """Speed-up of rollouts against k for some batches, with ranges for the one asked for; and of trainer steps.

    Raises:
        SpecConfigError: where matplotlib is not installed, or the file cannot be written.
    """
    if file.is_dir():
        raise SpecConfigError(f"--out {file} is a folder: name a file in it, such as {file / 'projection.png'}")
    try:
        import matplotlib
    except ImportError as error:
        raise SpecConfigError("--out needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), constrained_layout=True, sharey=True)
    largest = MOST_RESPONSES // max(1, question.lag)
    sizes = dict.fromkeys(min(largest, max(1, round(question.batch * share))) for share in _BATCHES)
    for i, batch in enumerate(sizes):
        asked = batch == question.batch
        answer = project(replace(question, batch=batch, ks=_KS), known, None if asked else 0)
        colour = plt.get_cmap("viridis")(0.9 * i / max(1, len(sizes) - 1))
        for panel, kind in zip(panels, ("rollout_speedup", "step_speedup"), strict=True):
            _line(panel, answer, kind, f"{batch} responses a step", colour, asked)
    for panel, title in zip(panels, ("rollouts", "trainer step"), strict=True):
        panel.axhline(1.0, color="gray", lw=0.8, ls=":")
        panel.set_xlabel("drafted tokens, k")
        panel.set_title(title)
    panels[0].set_ylabel("speed (plain: 1)")
    panels[1].legend(fontsize=8)
    d = question.deployment
    figure.suptitle(f"{d.model.name} on {question.gpus} {d.card.name}, projected; the band is the table's range")
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise SpecConfigError(f"--out {file}: {error}") from error
    finally:
        plt.close(figure)


def _line(panel: object, answer: Projection, kind: str, label: str, colour: object, band: bool) -> None:
    rows = [row for row in answer.rows if row.k > 0]
    spans = [getattr(row, kind) for row in rows]
    ks = [row.k for row in rows]
    panel.plot(ks, [s.typical for s in spans], color=colour, label=label, lw=2.0 if band else 1.2)  # type: ignore[attr-defined]
    if band:
        panel.fill_between(ks, [s.low for s in spans], [s.high for s in spans], color=colour, alpha=0.2)  # type: ignore[attr-defined]
