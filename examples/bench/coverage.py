"""Which launch scripts spec-plugin takes: ``spec-plugin check`` over many resolved command lines, in one process."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from spec_plugin_conformance.targets import tiny_targets  # noqa: E402

from spec_plugin.api.errors import SpecConfigError  # noqa: E402
from spec_plugin.commands.check import find_check, find_model, judge_run  # noqa: E402
from spec_plugin.plan.engine_class import engine_class  # noqa: E402
from spec_plugin.plan.refusals import OURS, read_json  # noqa: E402
from spec_plugin.plan.run_plan import FindModel, Model  # noqa: E402

DATA = Path(__file__).parent / "data"
FAMILIES = DATA / "model_families.json"

HELP = """Judge every command line of a file as `spec-plugin check` does, and count.

FILE holds JSON lines {"script": name, "module": the Python module, "args": [its arguments]}; those of verl's and of
OpenRLHF's own examples lie in data/. Run it where that trainer is installed. A model that is not on this disk is looked
up in data/model_families.json, which holds what its public config.json says.

\b
  python examples/bench/coverage.py --commands examples/bench/data/verl_examples.jsonl
"""


@dataclass(frozen=True)
class Row:
    """One command line, judged."""

    script: str
    reasons: tuple[str, ...]  # why not, in a few words each; distinct
    of_trainer: tuple[str, ...]  # those of them that are the trainer's own refusal
    objections: tuple[str, ...]  # the whole sentences
    unseen: tuple[str, ...]
    shapes: tuple[str, ...]  # ranks, actors and engines, in words
    family: str = ""  # tiny target of the kit that stands for the model; empty: none does
    judged: bool = True  # False: the trainer would get no configuration, so nothing could be said of ours

    @property
    def accepted(self) -> bool:
        return not self.reasons

    @property
    def ours_accepts(self) -> bool:
        """Nothing but the installed trainer itself objects."""
        return self.judged and set(self.reasons) <= set(self.of_trainer)


def main_table(rows: Sequence[Row]) -> list[str]:
    """The counts as Markdown: refusals by reason, and what each reason alone costs."""
    taken, ours = sum(r.accepted for r in rows), sum(r.ours_accepts for r in rows)
    lines = [
        f"accepted {taken} of {len(rows)}; {ours} but for what the installed trainer itself does not take as written"
    ]
    if known := sum(r.ours_accepts and bool(r.family) for r in rows):
        lines[0] += f"; {known} of these with a tiny target of their family in the kit"
    counts, alone = by_reason(rows), alone_costs(rows)
    if counts:
        lines += ["", "| reason | lines | alone |", "| --- | ---: | ---: |"]
        lines += [f"| {reason} | {count} | {alone[reason]} |" for reason, count in counts.most_common()]
    return lines


def by_reason(rows: Iterable[Row]) -> Counter[str]:
    """How many lines each reason refuses; a line may have several."""
    return Counter(reason for row in rows for reason in row.reasons)


def alone_costs(rows: Iterable[Row]) -> Counter[str]:
    """How many lines more would be accepted if only this reason went; of a line that was not judged nobody knows."""
    return Counter(row.reasons[0] for row in rows if len(row.reasons) == 1 and row.judged)


def shape_table(rows: Iterable[Row]) -> list[str]:
    """Each accepted script with its shape, and the kit's tiny target of its family."""
    taken = [row for row in rows if row.ours_accepts]
    lines = ["| accepted script | shape | target |", "| --- | --- | --- |"] if taken else []
    for row in taken:
        mark = "" if row.accepted else " (rewritten for the installed trainer)"
        lines.append(f"| {row.script}{mark} | {' '.join(row.shapes)} | {row.family or 'none'} |")
    return lines


def judge(line: Mapping[str, Any], find: FindModel) -> Row:
    """One command line; the trainer is the first part of its module's name."""
    module = str(line["module"])
    trainer = module.partition(".")[0]
    try:
        find_check(trainer)
    except SpecConfigError as error:
        return Row(str(line["script"]), (f"no adapter for {trainer}",), (), (str(error),), (), (), judged=False)
    looked_up: list[Mapping[str, Any]] = []

    def noting(name: str) -> Model:
        model = find(name)
        looked_up.append(model.config or {})
        return model

    judgement = judge_run(trainer, ["-m", module, *line["args"]], noting)
    return Row(
        str(line["script"]),
        tuple(dict.fromkeys(o.reason for o in judgement.objections)),
        tuple(dict.fromkeys(o.reason for o in judgement.objections if o.by != OURS)),
        tuple(map(str, judgement.objections)),
        judgement.unseen,
        (judgement.facts["shape"],) if judgement.facts else (),
        family_of(looked_up[0]) if looked_up else "",
        bool(judgement.facts),
    )


def family_of(hf: Mapping[str, Any]) -> str:
    """The tiny target that stands for a model: of the same class of vLLM, or of the same kind of text part.

    Args:
        hf: the model's config.json.
    """
    found, kind = engine_class(hf), (hf.get("text_config") or hf).get("model_type")
    same = [room.name for room in tiny_targets().values() if found is not None and room.engine_class == found.name]
    return next(iter(same), str(kind) if kind in tiny_targets() else "")


def finder(given: Mapping[str, Path], families: Mapping[str, Any]) -> FindModel:
    """Looks in what the user gave, on this disk, then in the table; by the whole name, then by its last part."""

    def find(name: str) -> Model:
        last = name.rstrip("/").rpartition("/")[2]
        for key in (name, last):
            if key in given:
                return Model(name, read_json(given[key]), str(given[key]))
        found = find_model(name)
        return found if found.config or last not in families else Model(name, families[last], FAMILIES.name)

    return find


def _pairs(texts: Sequence[str]) -> dict[str, Path]:
    wrong = [text for text in texts if "=" not in text]
    if wrong:
        raise click.BadParameter(f"{wrong[0]!r} is not NAME=FILE", param_hint="--model-config")
    return {name: Path(file) for name, _, file in (text.rpartition("=") for text in texts)}


@click.command(help=HELP, context_settings={"max_content_width": 120})
@click.option("--commands", type=click.Path(exists=True, path_type=Path), required=True, help="The command lines.")
@click.option("--model-config", "configs", multiple=True, metavar="NAME=FILE", help="A config.json for this model.")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write the whole table here.")
def main(commands: Path, configs: tuple[str, ...], out: Path | None) -> None:
    find = finder(_pairs(configs), json.loads(FAMILIES.read_text()))
    rows = [judge(json.loads(line), find) for line in commands.read_text().splitlines() if line.strip()]
    click.echo("\n".join([*main_table(rows), "", *shape_table(rows)]))
    if unseen := [f"{row.script}: {what}" for row in rows for what in row.unseen if row.accepted]:
        click.echo("\n".join(["", "accepted, but not wholly looked at:", *unseen]))
    if out is not None:
        out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
