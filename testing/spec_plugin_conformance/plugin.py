"""The pytest plugin behind ``pytest -p spec_plugin_conformance --adapter NAME``: chooses the adapter, runs, reports."""

from __future__ import annotations

import functools
import importlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import rich.progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spec_plugin.api.config import SpecConfig
from spec_plugin.api.errors import SpecConfigError
from spec_plugin_conformance.driver import DRIVER_GROUP, ConformanceDriver
from spec_plugin_conformance.runs import REFUSED, KitRun, KitRuns, Progress
from spec_plugin_conformance.targets import tiny_targets

CHECKS_FILE = Path(__file__).with_name("checks.py")
_STYLE = {"supported": "green", "refused": "yellow", "known": "yellow", "failed": "bold red"}
_KIT = "spec_plugin_conformance_kit"


@dataclass
class CheckResult:
    """One check's result, a line of the report."""

    check: str
    state: str  # "supported", "refused", "known" or "failed"
    reason: str
    seconds: float


def load_driver(name: str) -> type[ConformanceDriver]:
    """The driver class of an adapter.

    Args:
        name: of an entry point in the group ``spec_plugin_conformance``, or ``module:Class``.

    Raises:
        pytest.UsageError: listing the known names, or why it cannot be imported.
    """
    known = {ep.name: ep for ep in entry_points(group=DRIVER_GROUP)}
    try:
        if name in known:
            found: Any = known[name].load()
        elif ":" in name:
            module, _, attribute = name.partition(":")
            found = getattr(importlib.import_module(module), attribute)
        else:
            raise pytest.UsageError(
                f"no adapter named {name!r} in the entry point group {DRIVER_GROUP}; known: {_names(known)}; or name the "
                "driver as module:Class"
            )
    except pytest.UsageError:
        raise
    except Exception as error:  # of a name that is none, or of whatever the module does
        raise pytest.UsageError(f"the driver of adapter {name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, ConformanceDriver)):
        raise pytest.UsageError(f"{name!r} is {found!r}, expected a subclass of ConformanceDriver")
    return found


def options_of(words: Iterable[str]) -> dict[str, Any]:
    """Options of the plugin by name; values are read as JSON where they are some.

    Raises:
        pytest.UsageError: for a word that is not NAME=VALUE, or an option that the plugin does not take.
    """
    found: dict[str, Any] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign:
            raise pytest.UsageError(f"--spec {word}: expected NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    try:
        SpecConfig.parse(found, prefix="--spec ")
    except SpecConfigError as error:
        raise pytest.UsageError(str(error)) from None
    return found


def shaped(
    driver: type[ConformanceDriver], name: str, shape: str | None, family: str | None = None
) -> Callable[[Path], ConformanceDriver]:
    """The driver class bound to this shape and family; called with the root folder.

    Raises:
        pytest.UsageError: listing the shapes that it knows, or the families that the kit has.
    """
    if family is not None:
        if family not in tiny_targets():
            raise pytest.UsageError(
                f"--target {family}: the kit has no such family; known: {', '.join(tiny_targets())}"
            )
        if not driver.takes_families:
            raise pytest.UsageError(f"--target {family}: the driver of {name!r} makes its own policy; leave it out")
        if missing := tiny_targets()[family].missing:
            raise pytest.UsageError(
                f"--target {family}: it needs {', '.join(missing)}, not installed here: pip install it"
            )
    chosen: dict[str, Any] = {} if family is None else {"family": family}
    if shape is None:
        return functools.partial(driver, **chosen) if chosen else driver
    if shape not in driver.shapes:
        known = "; ".join(f"{known}: {what}" for known, what in driver.shapes.items()) or "it knows none"
        raise pytest.UsageError(f"--shape {shape}: the driver of {name!r} has no such shape; {known}")
    return functools.partial(driver, shape=shape, **chosen)


def _names(known: Iterable[str]) -> str:
    return ", ".join(sorted(known)) or "none"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the kit's options to pytest's."""
    group = parser.getgroup("spec-plugin conformance")
    group.addoption("--adapter", metavar="NAME", help=f"entry point in group {DRIVER_GROUP}, or module:DriverClass")
    group.addoption("--kit-shape", metavar="SHAPE", help="deployment shape of the runs, one that the driver knows")
    group.addoption("--kit-target", metavar="FAMILY", help="family of the tiny policy, one that the kit has")
    group.addoption(
        "--kit-spec",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the plugin, for all runs with it",
    )
    group.addoption("--kit-badge", metavar="FILE", help="write a Markdown table of what this adapter supports")
    group.addoption("--kit-keep", metavar="DIR", help="run in this folder and keep what the trainer wrote")


def pytest_configure(config: pytest.Config) -> None:
    """Load the driver of ``--adapter``; without other arguments collect the kit's checks alone.

    Raises:
        pytest.UsageError: if there is no such adapter.
    """
    if config.getoption("help") or config.getoption("version"):
        return
    name = config.getoption("--adapter")
    if not name:
        known = _names([ep.name for ep in entry_points(group=DRIVER_GROUP)])
        raise pytest.UsageError(f"--adapter is missing: an adapter's name (known: {known}) or module:DriverClass")
    keep = config.getoption("--kit-keep")
    if keep and any(Path(keep).glob("*")):  # a policy and recorded rollouts of theirs, which would be taken for ours
        raise pytest.UsageError(
            f"{keep} is not empty: the kit keeps its runs in a new folder, so name another one, or remove it"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    options = options_of(config.getoption("--kit-spec"))
    kit = Kit(
        config, name, load_driver(name), config.getoption("--kit-shape"), options, config.getoption("--kit-target")
    )
    config.pluginmanager.register(kit, _KIT)
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(CHECKS_FILE)]


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest) -> Iterator[KitRuns]:
    """The runs of this session, in ``--kit-keep`` or in a folder that is removed at the end."""
    kit: Kit = request.config.pluginmanager.getplugin(_KIT)
    keep = request.config.getoption("--kit-keep")
    root = Path(keep).absolute() if keep else Path(tempfile.mkdtemp(prefix="spec-plugin-conformance-"))
    root.mkdir(parents=True, exist_ok=True)
    asked = {item.name for item in request.session.items}
    kit.runs = KitRuns(kit.make_driver, root, _Bars(request.config), asked, kit.options)
    yield kit.runs
    if not keep:
        shutil.rmtree(root, ignore_errors=True)


class Kit:
    """One session of the kit: collects the checks, shares the runs, prints the report."""

    def __init__(
        self,
        config: pytest.Config,
        name: str,
        driver: type[ConformanceDriver],
        shape: str | None,
        options: Mapping[str, Any],
        family: str | None = None,
    ) -> None:
        words = [
            name,
            *(word for word in (shape, family) if word),
            *(f"{option}={value}" for option, value in options.items()),
        ]
        self._config, self._name, self.driver, self.options = config, ", ".join(words), driver, options
        self.make_driver = shaped(driver, name, shape, family)
        self._known = driver.known_in.get(shape, {})
        self._results: dict[str, CheckResult] = {}
        self.runs: KitRuns | None = None

    @pytest.hookimpl
    def pytest_pycollect_makeitem(self, collector: Any, name: str, obj: object) -> Any:
        """The checks have names of their own, without ``test_``."""
        if getattr(collector, "path", None) != CHECKS_FILE:
            return None
        from spec_plugin_conformance.checks import CHECKS

        return pytest.Function.from_parent(collector, name=name) if name in {c.__name__ for c in CHECKS} else []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """What the adapter refuses is skipped, with its reason; what fails for another's sake is to fail."""
        for item in items:
            if item.path != CHECKS_FILE:
                continue
            if reason := self.driver.refused.get(item.name):
                item.add_marker(pytest.mark.skip(reason=REFUSED + reason))
            elif reason := self._known.get(item.name):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note each check's result and its seconds, of set-up and call together."""
        report = yield
        if item.path == CHECKS_FILE:
            row = self._results.setdefault(item.name, CheckResult(item.name, "supported", "", 0.0))
            row.seconds += report.duration
            if report.skipped and hasattr(report, "wasxfail"):
                row.state, row.reason = "known", report.wasxfail
            elif report.skipped and isinstance(report.longrepr, tuple):
                reason = report.longrepr[2].removeprefix("Skipped: ")
                row.state, row.reason = "refused", reason.removeprefix(REFUSED)
            elif report.failed:
                row.state, row.reason = "failed", str(report.longrepr).strip()
        return report

    def pytest_terminal_summary(self) -> None:
        """The report, the runs' times, and the badge."""
        if not self._results:
            return
        rows = list(self._results.values())
        console = Console()
        console.print()
        console.print(report_table(self._name, rows))
        runs = self.runs.by_name.values() if self.runs else ()
        if runs:
            console.print("runs: " + ", ".join(f"{r.name} {r.seconds:.0f} s" for r in runs), highlight=False)
        badge = self._config.getoption("--kit-badge")
        if badge:
            Path(badge).write_text(badge_table(self._name, rows))


def report_table(name: str, rows: list[CheckResult]) -> Table:
    """The terminal's table: check, result, seconds, first line of the reason."""
    table = Table(title=f"conformance of {name}", title_justify="left", box=None)
    table.add_column("check", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("reason")
    for row in rows:
        reason = row.reason.splitlines()[0] if row.reason else ""
        table.add_row(row.check, Text(row.state, style=_STYLE[row.state]), f"{row.seconds:.1f}", Text(reason))
    return table


def badge_table(name: str, rows: list[CheckResult]) -> str:
    """The Markdown table that an adapter shows in its README."""
    counts = [(state, sum(r.state == state for r in rows)) for state in _STYLE]
    summary = ", ".join(f"{n} {state}" for state, n in counts if n)
    lines = [f"**{name}**: {summary} (of {len(rows)} checks)", "", "| check | result |", "| --- | --- |"]
    for row in rows:
        reason = row.reason.splitlines()[0].replace("|", "\\|") if row.reason else ""
        lines.append(f"| `{row.check}` | {row.state}{': ' + reason if reason else ''} |")
    return "\n".join(lines) + "\n"


class _Bars(Progress):
    """A bar for each run, past pytest's capturing; where there is no terminal, one line when it ends."""

    def __init__(self, config: pytest.Config) -> None:
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            stream = os.fdopen(os.dup(2), "w")  # the terminal itself: pytest redirects the number 2 while a check runs
        self._console = Console(file=stream, highlight=False)
        self._bars: rich.progress.Progress | None = None

    def begin(self, name: str, steps: int) -> None:
        if self._console.is_terminal:
            self._bars = rich.progress.Progress(
                *rich.progress.Progress.get_default_columns()[:2],
                rich.progress.MofNCompleteColumn(),
                rich.progress.TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._bars.start()
            self._bars.add_task(f"run {name}", total=steps)

    def step(self, name: str, step: int) -> None:
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[0], completed=step)

    def end(self, run: KitRun) -> None:
        if self._bars is not None:
            self._bars.stop()
        state = f"{len(run.metrics)} steps" + (", stopped early" if run.failure else "")
        self._console.print(f"  run {run.name}: {state}, {run.seconds:.0f} s", soft_wrap=True)
