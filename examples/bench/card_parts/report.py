"""Tables and a picture from the records of all parts; nothing is measured here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.bench.card_parts.record import resume
from examples.bench.common import say

Content = dict[str, Any]
Table = tuple[str, Sequence[str], list[Sequence[object]]]


def write(out: Path, parts: Iterable[str]) -> Path:
    """Write ``card.md``, and ``card.png`` where matplotlib is there.

    Args:
        out: folder of the records; parts that did not run are left out.
        parts: their names, in order.

    Returns:
        The file with the tables.
    """
    found = _found(out, parts)
    file = out / "card.md"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(_lines(found)) + "\n")
    try:
        from examples.bench.card_parts.picture import draw
    except ImportError as error:
        say(f"no picture: {error}")
        return file
    draw({content["part"]: content for content in found}, out / "card.png")
    return file


def merge(out: Path, parts: Iterable[str], file: Path) -> None:
    """Write the records of all parts that have run into one JSON, without the paths of that machine.

    Args:
        out: folder of the records.
        parts: names, in order.
        file: of the result.
    """
    found = _found(out, parts)
    for content in found:
        content["settings"] = {name: v for name, v in content["settings"].items() if name not in ("small", "work")}
    file.write_text(json.dumps({"benchmark": "card", "parts": found}, indent=1) + "\n")


def _found(out: Path, parts: Iterable[str]) -> list[Content]:
    return [resume(out / f"{part}.json").content for part in parts if (out / f"{part}.json").exists()]


def _lines(found: Sequence[Content]) -> Iterable[str]:
    if not found:
        yield "No part has run."
        return
    where, settings = found[-1]["environment"], found[-1]["settings"]
    if "claim" in found[-1]:
        yield f"**This is {found[-1]['claim']}.**\n"
    versions = ", ".join(f"{name} {v}" for name, v in where["versions"].items())
    card = f"{where['card']} ({where['card_memory']}), driver {where['driver']}" if where["card"] else where["cpu"]
    yield f"{card}; {versions}; {where['date']}; commit {where['commit']}; shape {settings['shape']}, {settings['dtype']}\n"
    for content in found:
        why = f": {content['why'].strip().splitlines()[-1]}" if content["why"] else ""
        yield f"## {content['part']} ({content['status']} after {content.get('seconds', 0):.0f} s{why})\n"
        for note in dict.fromkeys(content["notes"]):
            yield f"- {note}"
        for title, columns, rows in TABLES[content["part"]](content):
            if rows:
                yield from (f"\n{title}\n", _line(columns), _line(["---"] + ["---:"] * (len(columns) - 1)))
                yield from map(_line, rows)
        yield ""


def _line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(_text, cells))} |"


def _text(value: object) -> str:
    if isinstance(value, Mapping) and "median" in value:  # a spread
        return f"{value['median']:.3g} ({value['low']:.3g}-{value['high']:.3g})"
    return f"{value:.3g}" if isinstance(value, float) else "" if value is None else str(value)


def rows_of(content: Content, kind: str) -> list[dict[str, Any]]:
    """The rows of one kind."""
    return [row for row in content["rows"] if row["kind"] == kind]


def _plain(content: Content, kind: str, title: str, columns: Sequence[str]) -> Table:
    """A table of a row's own entries, by name."""
    body = [[row.get(name) for name in columns] for row in rows_of(content, kind)]
    return title, columns, [[_last_line(cell) if isinstance(cell, str) else cell for cell in row] for row in body]


def _last_line(text: str) -> str:
    """Of a traceback; the record has all of it."""
    return (text.strip().splitlines() or [""])[-1].replace("|", "/")


def _smoke(content: Content) -> Iterable[Table]:
    columns = ["group", "item", "result", "seconds", "seen"]
    body: list[Sequence[object]] = [[row[name] for name in columns] for row in rows_of(content, "smoke")]
    yield "What ran", columns, [[_last_line(cell) if isinstance(cell, str) else cell for cell in row] for row in body]


def _trainer(content: Content) -> Iterable[Table]:
    yield from _smoke(content)
    columns = ["tokens", "precision", "seconds", "of", "before_mib", "ready_mib", "between_steps_mib", "peak_mib"]
    yield _plain(content, "training", "One optimizer step of the draft", [*columns, "out_of_memory"])
    columns = ["tokens", "precision", "kernel", "ms", "share"]
    yield _plain(content, "profile", "What a step spends its time on", columns)


def _start(content: Content) -> Iterable[Table]:
    columns = ["engine", "seconds_to_start", "runner", "cudagraph_mode", "graphs_captured", "graphs_mib"]
    columns += ["async_scheduling"]
    yield _plain(content, "engine", "Engines", columns)
    yield _plain(content, "engine lost", "Engines that did not start", ["engine", "reason"])
    columns = ["batch", "arm", "ms", "against_off", "mean_ms", "prefill_ms", "tokens_per_step", "tokens_per_second"]
    yield _plain(content, "step", "Milliseconds of a decoding step with the whole batch: median (quartiles)", columns)


def _rollouts(content: Content) -> Iterable[Table]:
    rows = rows_of(content, "rollouts")
    arms = list(rows[0]["rates"]) if rows else []
    columns = [
        "regime",
        *arms,
        "controller / k=0",
        "/ engine without the flag",
        "/ best k",
        "acceptance length, largest k",
    ]
    body: list[Sequence[object]] = []
    for row in rows:
        best = f"{row['best']}: {_text(row['against_best'])}"
        largest = row["acceptance"][f"k={row['k']}"]
        ratios = [row["against_plain"], row["against_live"], best, largest]
        body.append([row["regime"], *(row["rates"][arm]["median"] for arm in arms), *ratios])
    yield "Tokens per second, medians; ratios round by round with quartiles", columns, body


def _tolerances(content: Content) -> Iterable[Table]:
    body: list[Sequence[object]] = []
    greedy = rows_of(content, "greedy")
    for of in dict.fromkeys(row["of"] for row in greedy):
        rows = [row for row in greedy if row["of"] == of]
        gaps = [gap for row in rows for gap in row["gaps"]]
        same = f"{sum(row['identical'] for row in rows)}/{sum(row['prompts'] for row in rows)}"
        passed = all(row["self_test_would_pass"] for row in rows)
        body.append([of, ", ".join(row["against"] for row in rows), same, max(gaps, default=0.0)])
        body[-1] = [*body[-1], rows[0]["limit_of_this_noise"], passed]
    columns = ["greedy text of", "against each of", "identical", "largest gap, nats", "limit", "self-test would pass"]
    yield "Gap: how much likelier the base's token was where a text first differs", columns, body
    for row in rows_of(content, "self-test"):
        checks: list[Sequence[object]] = [
            [c["name"], c["passed"], c["detail"].replace("|", "/")] for c in row["checks"]
        ]
        yield f"Our self-test: {'passed' if row['passed'] else 'not passed'}", ["check", "passed", "detail"], checks
    rows = rows_of(content, "log-probs")
    quantiles = list(dict.fromkeys(q for row in rows for q in row["quantiles"]))
    head = ["temperature", "arm", "tokens", "mean", *quantiles, "max", "beyond 1 nat", "beyond 3 nats"]
    body = [
        [
            *(row[name] for name in ("temperature", "arm", "tokens", "mean")),
            *(row["quantiles"].get(q) for q in quantiles),
            *(row[name] for name in ("max", "beyond_1_nat", "beyond_3_nats")),
        ]
        for row in rows
    ]
    yield "Log-probs: engine against HF, nats; quantiles of single tokens", head, body
    body = [
        [row["temperature"], row["arm"], length, about["sequences"], about["median"], about["max"]]
        for row in rows
        for length, about in row["sequence_means"].items()
    ]
    head = ["temperature", "arm", "tokens of a sequence", "sequences", "median of means", "largest mean"]
    yield "The mean difference of a sequence, by its length", head, body
    head = ["temperature", "run", "batches", "refused"]
    yield _plain(content, "guard", "The provenance guard on these differences (refused: should be none)", head)


def _sleep(content: Content) -> Iterable[Table]:
    body: list[Sequence[object]] = []
    cycles = rows_of(content, "cycle")
    for level in dict.fromkeys(row["level"] for row in cycles):
        rows = [row for row in cycles if row["level"] == level]
        ids = [sorted({str(row[f"ids_after_{when}"]) for row in rows}) for when in ("wake", "refresh")]
        wrong = [sorted({name for row in rows for name in row[when]}) for when in ("changed_by_sleep", "not_restored")]
        same = f"{sum(row['identical'] for row in rows)}/{sum(row['requests'] for row in rows)}"
        lengths = [row["acceptance_length"] for row in rows]
        body.append([level, len(rows), *map(", ".join, ids), same, min(lengths), max(lengths)])
        body[-1] = [*body[-1], len(wrong[0]), ", ".join(wrong[1]) or "none"]
    columns = [
        "level",
        "cycles",
        "ids not zero after waking",
        "after refresh",
        "text identical",
        "least acceptance length",
    ]
    columns += ["most", "tensors changed by sleep", "of them not restored by the refresh"]
    yield "Cycles of sleep, wake-up and refresh", columns, body
    names = list(dict.fromkeys(name for row in cycles for name in row["seconds"]))
    body = [[f"{row['level']}, {row['cycle']}", *(row["seconds"].get(name) for name in names)] for row in cycles]
    yield "Seconds", ["level, cycle", *names], body
    yield _plain(content, "engine lost", "Engines that did not survive", ["level", "reason"])


def _trl(content: Content) -> Iterable[Table]:
    yield _plain(
        content, "policy", "The policy, embedded in a large shape", ["nats", "shape", "sequences", "tokens", "each"]
    )
    columns = ["nats", "run", "step", "response_tokens", "generation_s", "step_s", "speculating", "acceptance_length"]
    yield _plain(content, "grpo", "Steps of both runs", [*columns, "speedup_realised", "draft_training_ms", "woken"])
    body: list[Sequence[object]] = []
    for row in rows_of(content, "sums"):
        whole = row["whole"]["plain"] / row["whole"]["flag"]
        body.append([row["nats"], row["steps"], row["first"]["plain"], row["first"]["flag"], whole, row["ratio"]])
        body[-1] = [*body[-1], row["drafted_from"], row["acceptance_length"], row["generation"], row["step"]]
    columns = [
        "nats",
        "steps",
        "first step without, s",
        "with, s",
        "whole run",
        "all but the first step",
        "drafted from",
    ]
    columns += ["tokens a verification", "generation", "whole step"]
    yield (
        "Without the flag over with it, per token; the last two from the step on that drafts to the end",
        columns,
        body,
    )
    yield _plain(content, "run lost", "Runs that ended before their last step", ["nats", "reason"])


def _head(content: Content) -> Iterable[Table]:
    columns = ["batch", "vocabulary", "layer_ms", "head_ms", "head_share", "greedy_ms", "drawn_ms", "drawing_of_a_pass"]
    yield _plain(content, "head", "A draft's pass without its attention over the context", columns)


def _fp8(content: Content) -> Iterable[Table]:
    yield from _smoke(content)
    yield from _start(content)


def _memory(content: Content) -> Iterable[Table]:
    columns = ["batch", "k", "of", "idle_mib", "peak_mib", "above_idle_mib", "tokens_per_second"]
    yield _plain(content, "peak", "Memory while rolling out with log-probs, MiB", columns)
    for row in rows_of(content, "refresh"):
        phases = [(f"sender: {n}", ms) for n, ms in row["sender_ms"].items()]
        for kind, worker in row.get("worker_ms", {}).items():  # of older files
            phases += [(f"worker, told a {kind}: {n}", ms) for n, ms in worker.items() if n != "crossed"]
            phases.append((f"worker, told a {kind}: MB between host and device", worker["crossed"]))
        for kind, whole in row["install_ms"].items():
            phases.append((f"worker, told a {kind}: in one call, as in a run", whole))
        yield f"A refresh of {row['megabytes']:.0f} MB", ["phase", "ms"], list(phases)
    yield _plain(content, "engine lost", "Engines that did not survive", ["reason"])


TABLES: Mapping[str, Callable[[Content], Iterable[Table]]] = {
    "smoke": _smoke,
    "trl": _trl,
    "start": _start,
    "rollouts": _rollouts,
    "head": _head,
    "memory": _memory,
    "tolerances": _tolerances,
    "trainer": _trainer,
    "fp8": _fp8,
    "sleep": _sleep,
}
