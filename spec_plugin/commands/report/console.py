"""Reads a console log: steps as adapters say that their trainers print them, and the plugin's own lines, to be quoted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spec_plugin.commands.report.formats import LogFormat
from spec_plugin.commands.report.numbering import Bar, Unnumbered, numbered, steps_per_epoch, training_bars
from spec_plugin.commands.report.numbers import MOST_STEPS
from spec_plugin.commands.report.raw import Raw
from spec_plugin.commands.report.run import Notice
from spec_plugin.errors import FATAL

_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_RAY_PREFIX = re.compile(r"(?:\x1b\[[\d;]*m)*\((?:\w+ )?pid=[^)]*\)(?:\x1b\[[\d;]*m)* ?")
_OURS = " spec-plugin: "
_NOTICE = re.compile(rf"\b(INFO|WARNING|ERROR) \d{{4}}-\d\d-\d\d [\d:,]+{_OURS}(.*)")
_STOPPED = re.compile(rf"^(?:spec_plugin\.errors\.)?({'|'.join(error.__name__ for error in FATAL)}): (.*)")
_LINES_OF_A_NOTICE = 8
_DIGITS = len(str(MOST_STEPS)) - 1
#: what wipes a progress bar out, so that a line can be printed in its place
_WIPE = re.compile(r"\r {5,}\r")
#: what is left of it in a line
_LEFT = re.compile(r"\r *(?=\r|$)|\r|\x1b\[A")


@dataclass
class _Drawn:
    """Progress bars among the lines, of trainers that have one; each line is handed on without them."""

    formats: Sequence[LogFormat]
    bars: list[Bar] = field(default_factory=list)
    wipes: int = 0  # how often one was wiped out

    def taken_out(self, line: str) -> tuple[int, str]:
        """How many bars were drawn before what else is in a line, and that; a bar may also stand in the middle of it."""
        if "\r" not in line and "%|" not in line:
            return len(self.bars), line
        found = next((bars for form in self.formats if (bars := list(form.progress_bar.finditer(line)))), [])
        before, rest, at = len(self.bars), "", 0
        for bar in found:
            rest += self._left_of(line[at : bar.start() + 1])  # with the bar's own \r
            at = bar.end()
            if max(len(bar["step"]), len(bar["steps"])) <= _DIGITS:
                self.bars.append(Bar(int(bar["step"]), int(bar["steps"]), self.wipes))
            if not (rest := rest.lstrip()):  # a bar that was longer is written over with spaces
                before = len(self.bars)
        rest += self._left_of(line[at:])
        return before, rest.lstrip() if found else line

    def _left_of(self, text: str) -> str:
        self.wipes += len(_WIPE.findall(text))
        return _LEFT.sub("", text)


def read_console(lines: Iterable[str], file: Path, formats: Sequence[LogFormat], per_epoch: float | None) -> Raw:
    """The steps in a log, and the plugin's own lines.

    Args:
        lines: of the log.
        file: where they are from, for messages.
        formats: what trainers may have printed.
        per_epoch: steps in an epoch, where another file of the run has told, for a trainer that prints no numbers of steps.
    """
    raw, drawn = Raw(), _Drawn(formats)
    pending: list[Notice] = []  # of the step whose line is still to come
    waiting: list[tuple[Unnumbered, list[Notice]]] = []
    printed: list[int] = []  # of each line that was printed through a progress bar, the bars before it
    last: int | None = None
    for bars, line, following in _with_continuation(lines, drawn):
        if said := _said(line, following):
            pending.append(said)
            continue
        for form in formats:
            if (found := form.step_line.search(line)) and len(step := found.groupdict().get("step") or "") <= _DIGITS:
                metrics = {m["name"]: float(m["value"]) for m in form.metric_pattern.finditer(found["metrics"])}
                if step:
                    last = int(step)
                    raw.add(last, metrics, file)
                    raw.notices += [Notice(last, n.level, n.text) for n in pending]
                else:
                    waiting.append((Unnumbered(metrics, form.epoch_of(metrics), bars, len(printed)), pending))
                pending = []
            elif (found := form.planned_line.search(line)) and len(found["steps"]) <= _DIGITS:
                raw.planned = int(found["steps"])
            if form.printed_line.search(line):
                printed.append(bars)
    if waiting:
        last = _number(raw, waiting, printed, drawn.bars, per_epoch, file)
    raw.notices += [Notice(last + 1 if last is not None else None, n.level, n.text) for n in pending]
    return raw


def _number(
    raw: Raw,
    waiting: Sequence[tuple[Unnumbered, Sequence[Notice]]],
    printed: Sequence[int],
    drawn: Sequence[Bar],
    per_epoch: float | None,
    file: Path,
) -> int:
    """Lines without a number get one; the last of them is returned."""
    lines, bars = [line for line, _ in waiting], training_bars(drawn)
    raw.planned = next((bar.steps for bar in bars if bar), raw.planned)
    per_epoch = per_epoch or steps_per_epoch(lines, printed, bars)
    if per_epoch is None:
        raw.remarks.append(
            f"{file.name}: its lines do not say which step they are of, nor is a progress bar among them. They are counted, "
            "which is wrong for a run that was resumed or does not log each step; its folder with the checkpoints tells more"
        )
    steps = numbered(lines, per_epoch)
    for step, (line, notices) in zip(steps, waiting, strict=True):
        raw.add(step, line.metrics, file)
        raw.notices += [Notice(step, n.level, n.text) for n in notices]
    return steps[-1]


def _said(line: str, following: Sequence[str]) -> Notice | None:
    """The plugin's own line, or the error with which it stopped the run."""
    if _OURS in line and (found := _NOTICE.search(line)):
        return Notice(None, found[1], "\n".join([found[2], *following]))
    if found := _STOPPED.match(line):
        return Notice(None, "ERROR", f"{found[1]}: " + "\n".join([found[2], *following]))
    return None


def _with_continuation(lines: Iterable[str], drawn: _Drawn) -> Iterator[tuple[int, str, list[str]]]:
    """Each line without progress bars, Ray's prefix and colours, the bars before it, and the indented lines that follow it."""
    held: tuple[int, str, list[str]] | None = None
    for line in lines:
        bars, plain = drawn.taken_out(line.rstrip("\n"))
        if prefix := _RAY_PREFIX.match(plain):
            plain = plain[prefix.end() :]
        plain = _COLOUR.sub("", plain) if "\x1b" in plain else plain
        if held and plain.startswith("  ") and len(held[2]) < _LINES_OF_A_NOTICE:
            held[2].append(plain)
            continue
        if held:
            yield held
        held = (bars, plain, [])
    if held:
        yield held
