"""The GPU hour: does what never ran on a card run, what does a trainer gain there, what does each step take, how exact is it."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import tomllib

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that this file runs by path, from anywhere

from examples.bench import common  # noqa: E402
from examples.bench.card_parts import record as records  # noqa: E402
from examples.bench.card_parts import report  # noqa: E402
from examples.bench.card_parts.record import Record  # noqa: E402
from examples.bench.card_parts.setup import TINY_PARTS, WITHOUT_MODELS  # noqa: E402
from examples.bench.common import say  # noqa: E402

#: minutes of each, in the order of what they decide: the most wanted number comes early
PARTS = {
    "smoke": 5.0,
    "trl": 10.0,
    "start": 5.0,
    "rollouts": 8.0,
    "head": 1.0,
    "memory": 4.0,
    "tolerances": 5.0,
    "trainer": 3.0,
    "fp8": 5.0,
    "sleep": 5.0,
}
MODELS_MINUTES = 10.0  # the small ones are taught in minutes, the large ones are written in half a minute
#: seconds before the hard limit, after which a part begins nothing new; the least that a part is begun with
MARGIN, LEAST = 30.0, 45.0

HELP = """Measure one GPU, in parts. Needs torch, transformers, vLLM, TRL (part trl) and this repository; no network.

\b
  smoke       minutes: each thing of an engine that no GPU has run yet, once, at a tiny shape, and a table to paste
  trl         GRPO in TRL, the engine beside the trainer, answers of a thousand tokens: with the flag and a newborn draft,
              and without, in turns; generation, whole steps, start-up
  start       runner, CUDA graphs and start-up of the engine with the flag and without; ms of a step at several batch sizes, for
              k = 0, 1, 3, 7, without the flag, with full CUDA graphs, on V1, with vLLM's own speculation (fixed k), in one pass
  rollouts    tokens per second without drafts, with each fixed k and under the controller, in turn
  head        which share of a draft's pass its LM head takes, whole and pruned, and what drawing from it takes
  memory      the most memory at large batches, and the phases of a refresh
  tolerances  greedy text, drafted and plain, in several batch shapes; log-probs of engine and HF; what our guards say
  trainer     without vLLM: the actor's hidden states, the draft's attention and training, and what a step of it takes
  fp8         an engine whose weights are FP8, with the flag
  sleep       sleep, wake-up and refresh, again and again: is the draft whole, is the text the same

\b
Each part has a process and a time limit of its own; OUT/<part>.json is written anew after every row, so that a part that
is ended keeps what it has. A part that fails leaves the others going. Called again with the same OUT, parts that are done on
this card with these sources are left alone (--again). At the end OUT/card.md has tables of all parts that have run there, in
whatever call, and OUT/card.png a picture. With a card for a quarter of an hour: --total 13.

\b
The model is a small trained one embedded exactly in the shape of Qwen3-8B (large.py), and so is its draft: text that a draft
can learn, at the cost of a large model. The small ones are made on the first call, in minutes, on any machine:
  python examples/bench/card.py --prepare --small DIR     # here; then carry DIR to the machine with the card
  python examples/bench/card.py --small DIR --work /dev/shm/card --out OUT --part start --part rollouts
The large ones take 17 GB in --work, and stay there for the next call.

Without a card, everything runs at a tiny shape: a rehearsal, whose numbers say nothing about a GPU.
"""


@click.command(help=HELP, context_settings={"max_content_width": 130, "show_default": True})
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(list(PARTS)),
    help="Run this one; may be repeated. [default: all]",
)
@click.option("--minutes", type=click.FloatRange(min=0.01), help="Hard limit of each part. [default: 1 to 10, by part]")
@click.option(
    "--total", type=click.FloatRange(min=0.01), help="Minutes for all of them; what does not fit is not begun."
)
@click.option("--again", is_flag=True, help="Also the parts that are done.")
@click.option("--nats", multiple=True, default=(1.0,), help="Entropy a token of the text of part trl; may be repeated.")
@click.option("--shape", type=click.Choice(["8b", "tiny"]), help="Of the model. [default: 8b on a card, else tiny]")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="[default: bfloat16 on a card, else float32]")
@click.option("--k", default=3, type=click.IntRange(1, 7), help="Most tokens drafted, but in part start.")
@click.option("--eager", is_flag=True, help="No CUDA graphs, nothing compiled; a CPU has it so.")
@click.option(
    "--small", type=click.Path(path_type=Path), default=common.CACHE / "card-small", help="Folder of the small pair."
)
@click.option(
    "--work", type=click.Path(path_type=Path), default=common.CACHE / "card-large", help="Folder of the large pair."
)
@click.option(
    "--out", type=click.Path(path_type=Path), default=common.RESULTS / "card", help="Folder of JSON, table, picture."
)
@click.option("--commit", help="Of these sources, where they are no git repository.")
@click.option("--threads", type=int, help="Compute threads of each process; default: all cores.")
@click.option("--prepare", is_flag=True, help="Only make the small pair and the large one.")
@click.option("--report", "only_report", is_flag=True, help="Only write table and picture of what OUT holds.")
@click.option("--merge", type=click.Path(path_type=Path), help="Also write all records of OUT into this JSON.")
def main(
    parts: tuple[str, ...],
    out: Path,
    prepare: bool,
    only_report: bool,
    merge: Path | None,
    total: float | None,
    again: bool,
    **options: Any,
) -> None:
    """Run the parts one after the other; the exit status is 1 if one of them is not done."""
    done = True
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a part is ended on the way out
    if not only_report:
        where = records.machine(options.pop("commit"))
        settings = settings_of(options, where)
        measured = [part for part in PARTS if not prepare and (not parts or part in parts)]
        if not again:
            measured = [part for part in measured if not is_done(out / f"{part}.json", settings, where)]
        # the large models are made before the first part that needs them
        first = next((i for i, part in enumerate(measured) if part not in TINY_PARTS + WITHOUT_MODELS), None)
        if prepare or first is not None:
            measured.insert(first or 0, "models")
        done = run_parts(measured, settings, where, out, seconds=60.0 * (total or math.inf))
    table = report.write(out, PARTS)
    click.echo(table.read_text())
    click.echo(f"table: {table}")
    if merge is not None:
        report.merge(out, PARTS, merge)
    sys.exit(0 if done else 1)


def settings_of(options: dict[str, Any], where: dict[str, Any]) -> dict[str, Any]:
    """The options with what follows from them and from the machine."""
    cuda = where["card"] is not None
    chosen = {
        "cuda": cuda,
        "shape": options["shape"] or ("8b" if cuda else "tiny"),
        "dtype": options["dtype"] or ("bfloat16" if cuda else "float32"),
        "eager": options["eager"] or not cuda,
        "nats": list(options["nats"]),
        "small": str(options["small"].absolute()),
        "work": str(options["work"].absolute()),
    }
    return {**options, **chosen}


def limits(seconds: float) -> dict[str, float]:
    """Of a part: seconds until it is ended, and until it begins nothing new."""
    return {"hard_seconds": seconds, "soft_seconds": max(0.5 * seconds, seconds - MARGIN)}


def is_done(file: Path, settings: dict[str, Any], where: dict[str, Any]) -> bool:
    """Has this part been done here already: on this card, with these sources, at these settings."""
    try:
        found = records.resume(file).content
    except ValueError:
        return False
    same = all(found["settings"].get(name) == settings[name] for name in ("shape", "dtype", "eager", "k", "nats"))
    here = all(found["environment"].get(name) == where[name] for name in ("card", "commit", "versions"))
    if done := found["status"] == "done" and same and here:
        say(f"{found['part']}: done at {found['environment']['date']}; --again runs it once more")
    return done


def command_of(record: Record) -> list[str]:
    """The process that runs a part."""
    return [sys.executable, "-m", "examples.bench.card_parts", str(record.file.absolute())]


def run_parts(
    parts: Sequence[str],
    settings: dict[str, Any],
    where: dict[str, Any],
    out: Path,
    command: Callable[[Record], Sequence[str]] = command_of,
    seconds: float = math.inf,
) -> bool:
    """Each part in a process of its own, up to its limit; True if all are done.

    Args:
        parts: names; where the first, which makes the models, fails, the others are not begun.
        settings: from :func:`settings_of`.
        where: from ``record.machine``.
        out: folder of the records.
        command: of each process.
        seconds: for all of them; those for which too little is left are not begun.
    """
    ended, until = [], time.monotonic() + seconds
    for part in parts:
        most = 60.0 * (settings["minutes"] or PARTS.get(part, MODELS_MINUTES))
        left = until - time.monotonic()
        if left < min(LEAST, most):
            say(f"{part}: not begun, {max(0.0, left):.0f} s are left of {seconds / 60:g} minutes")
            ended.append(False)
            continue
        click.secho(f"\n== {part}", bold=True)
        folder = Path(settings["work"]) if part == "models" else out
        given = {**settings, **limits(min(most, left))}
        record = records.begin(folder / f"{part}.json", part, given, where)
        status = run_part(record, command(record))
        ended.append(status == "done")
        if part == "models" and not ended[-1]:
            break
    return all(ended)


def run_part(record: Record, command: Sequence[str]) -> str:
    """One part in a process of its own; whatever becomes of that, the record says so.

    Args:
        record: as it begins.
        command: of the process.

    Returns:
        ``done``, ``failed`` or ``ended`` (at its limit).
    """
    began, limit = time.monotonic(), record.settings["hard_seconds"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        preexec_fn=os.setpgrp,  # engines have processes of their own: all are ended together
    )
    status, why = "ended", "from outside; the rows until then are here"
    try:
        process.wait(limit)
        status, why = "failed", f"the process of this part ended with status {process.returncode}, before it was done"
    except subprocess.TimeoutExpired:
        why = f"at its limit of {limit / 60:g} minutes; the rows until then are here"
    finally:
        _end(process)
        status = _conclude(record.file, status, why, time.monotonic() - began)
    return status


def _conclude(file: Path, status: str, why: str, seconds: float) -> str:
    """What became of a part: what it said itself, else what was seen."""
    found = records.resume(file)
    found.content["seconds"] = round(seconds, 1)
    if found.content["status"] == "running":
        found.content.update(status=status, why=why)
    found.save()
    say(f"{found.content['part']}: {found.content['status']} after {seconds:.0f} s, {len(found.content['rows'])} rows")
    return str(found.content["status"])


def environment() -> dict[str, str]:
    """Of a part: this repository is found, nobody is asked over a network, and vLLM takes what is installed."""
    paths = [
        str(ROOT),
        str(ROOT / "adapters"),
        str(ROOT / "testing"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if not any(metadata.distributions(name="spec-plugin")):
        paths.append(str(_declared()))
    return {**defaults, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _declared() -> Path:
    """A folder with what installing this repository would say of it: where nothing can be installed, adapters are found by it."""
    folder = common.CACHE / "declared"
    for file in (ROOT / "pyproject.toml", ROOT / "testing" / "pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        of = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        of.mkdir(parents=True, exist_ok=True)
        (of / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
        groups = {**project.get("entry-points", {}), "console_scripts": project.get("scripts", {})}
        lines = [f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in of.items()) for group, of in groups.items()]
        (of / "entry_points.txt").write_text("\n".join(lines))
    return folder


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    main()
