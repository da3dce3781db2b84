"""Make each mistake of ``tests/mutants`` in a copy of this tree, run the tests that it names, and say which of them survive.

``make mutants``, or with ``tests`` and ``testing`` on the path ``python -m mutants.run [-k WORD] [--jobs N] [--list]
[--check]``. Exit code 1 if a mistake survives; 2 if one cannot be made any more, a test that is named fails without it, or the
machine was too slow to tell. Tests start as forks of a process that has imported the libraries
(:class:`spec_plugin_cpu.forks.ForkServer`), so a mistake costs a few seconds.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from spec_plugin_cpu.forks import ForkServer

from mutants import ROOMS
from mutants.mutation import ROOT, Mutation, NotApplicable, path_of

#: what tests need of the tree
COPIED = (
    *("spec_plugin", "draft_training", "adapters", "testing", "projection", "tests", "examples", "docs"),
    *("README.md", "pyproject.toml", "LICENSE"),
)
#: of third parties only: our own modules are each copy's
WARM = (
    "torch.distributed",
    "transformers.models.qwen3.modeling_qwen3",
    "safetensors.torch",
    "pydantic",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.gpu_worker",
)
#: tests of what starts the others: in a fork they would see the tree's own, and not the copy's
COLD = path_of("test_forks.py")
#: threads that wait for each other on a busy machine take minutes
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
#: seconds after which a mistake may be one that makes tests go on for ever: it has died if the same tests, run again at once
#: without it, end in a third of that; else the machine is slow, and nothing was seen
LIMIT_S = 180.0
DIED, SURVIVED, BROKEN, SLOW = "died", "SURVIVED", "BROKEN", "SLOW"
T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """What became of one mutation, or of tests without any."""

    verdict: str
    seconds: float
    by: str  # the test that noticed, or what is wrong
    output: str = ""


class Copy:
    """A copy of the tree, in which one mistake at a time is made and tested."""

    def __init__(self, folder: Path, python: str) -> None:
        """Copy what is tested.

        Args:
            folder: does not exist yet.
            python: interpreter.
        """
        self._folder, self._python, self._made = folder, python, 0
        folder.mkdir()
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(ROOT / name, folder / name)

    def test(self, tests: Sequence[str], first_only: bool = True) -> Outcome:
        """Run tests; they "die" at the first that fails."""
        where = str(self._folder)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                (where, *(f"{where}/{folder}" for folder in ("adapters", "testing", "projection")))
            ),
            "TMPDIR": str(self._folder.parent),
            "VLLM_CACHE_ROOT": f"{where}/.cache/vllm",
            **ONE_THREAD,
            "COLUMNS": "200",  # pytest cuts a test's name to it
        }
        command = [
            sys.executable if any(path.startswith(COLD) for path in tests) else self._python,
            "-m",
            "pytest",
            *tests,
            "-q",
            "-p",
            "no:cacheprovider",
            *(["-x"] if first_only else []),
        ]
        began = time.perf_counter()
        try:
            done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return Outcome(SLOW, LIMIT_S, f"no end within {LIMIT_S:.0f} s")
        output, seconds = done.stdout + done.stderr, time.perf_counter() - began
        failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.M)
        if done.returncode == 0:
            return Outcome(SURVIVED, seconds, "", output)
        if (done.returncode == 1 and failed) or done.returncode < 0:
            return Outcome(
                DIED, seconds, failed[0].rpartition("/")[2] if failed else f"signal {-done.returncode}", output
            )
        return Outcome(BROKEN, seconds, "the tests cannot be run with it", output)

    def mutate(self, mutation: Mutation) -> Outcome:
        """Make one mistake, test, and take it back."""
        file = self._folder / mutation.file
        source, was = file.read_text(encoding="utf-8"), file.stat()
        try:
            file.write_text(mutation.applied(source), encoding="utf-8")
        except NotApplicable as error:
            return Outcome(BROKEN, 0.0, str(error))
        self._made += 1
        moment = was.st_mtime_ns + self._made * 10**9  # bytecode is told from that of other sources by their second
        os.utime(file, ns=(moment, moment))
        try:
            outcome = self.test(mutation.paths())
        finally:
            file.write_text(source, encoding="utf-8")
            os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
        if outcome.verdict == SLOW:
            without = self.test(mutation.paths())
            verdict = DIED if without.verdict == SURVIVED and without.seconds < LIMIT_S / 3 else SLOW
            return Outcome(verdict, outcome.seconds, f"{outcome.by}, without it {without.seconds:.0f} s")
        return outcome


def each(copies: Sequence[Copy], work: Sequence[T], what: Callable[[Copy, T], Outcome]) -> Iterable[tuple[T, Outcome]]:
    """Do all of the work, one piece in each copy at a time; results as they come."""
    free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def one(piece: T) -> Outcome:
        copy = free.get()
        try:
            return what(copy, piece)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        running = {pool.submit(one, piece): piece for piece in work}
        for done in as_completed(running):
            yield running[done], done.result()


def chosen(word: str) -> list[Mutation]:
    """Those with this word in file, text or meaning; all of them for an empty one."""
    return [m for room in ROOMS.values() for m in room if word.lower() in f"{m.file} {m.text} {m.breaks}".lower()]


def failing(copies: Sequence[Copy], mutations: Sequence[Mutation]) -> set[str]:
    """Test files whose tests, as far as they are named, fail without any mistake, and so notice nothing."""
    named: dict[str, set[str]] = {}
    for path in (path for mutation in mutations for path in mutation.paths()):
        named.setdefault(path.partition("::")[0], set()).add(path)
    work = [(file, [file] if file in paths else sorted(paths)) for file, paths in sorted(named.items())]
    failed = set()
    for (file, _), outcome in each(copies, work, lambda copy, piece: copy.test(piece[1], first_only=False)):
        if outcome.verdict != SURVIVED:
            failed.add(file)
            print(f"{file} fails without any mistake: {outcome.by}\n{outcome.output}", flush=True)
    print(f"{len(work) - len(failed)} of {len(work)} test files pass as they are", flush=True)
    return failed


def tried(copies: Sequence[Copy], mutations: Sequence[Mutation], useless: set[str]) -> dict[Mutation, Outcome]:
    """Make them all, with a line for each; those that need a test that fails anyway are broken."""
    outcomes: dict[Mutation, Outcome] = {}

    def one(copy: Copy, mutation: Mutation) -> Outcome:
        failed = useless.intersection(path.partition("::")[0] for path in mutation.paths())
        return Outcome(BROKEN, 0.0, f"{min(failed)} fails without it") if failed else copy.mutate(mutation)

    for mutation, outcome in each(copies, mutations, one):
        outcomes[mutation] = outcome
        place = mutation.file.removeprefix("spec_plugin/").removesuffix(".py")
        print(
            f"{len(outcomes):>3}/{len(mutations)} {outcome.verdict:8} {outcome.seconds:5.1f} s  {place}: {mutation.breaks}",
            *([f"{'':26}{outcome.by}"] if outcome.by else []),
            sep="\n",
            flush=True,
        )
    return outcomes


def table(outcomes: dict[Mutation, Outcome], seconds: float) -> str:
    """How many of each room died, and all that did not."""
    lines = [f"\n{'room':20} {'mistakes':>8} {'died':>6} {'survived':>9} {'broken':>7} {'slow':>5}"]
    for room, mutations in ROOMS.items():
        verdicts = [outcomes[m].verdict for m in mutations if m in outcomes]
        counts = (len(verdicts), *(verdicts.count(v) for v in (DIED, SURVIVED, BROKEN, SLOW)))
        lines.append(f"{room:20} {counts[0]:8} {counts[1]:6} {counts[2]:9} {counts[3]:7} {counts[4]:5}")
    verdicts = [o.verdict for o in outcomes.values()]
    counts = (len(verdicts), *(verdicts.count(v) for v in (DIED, SURVIVED, BROKEN, SLOW)))
    lines.append(
        f"{'all':20} {counts[0]:8} {counts[1]:6} {counts[2]:9} {counts[3]:7} {counts[4]:5}   in {seconds:.0f} s"
    )
    for mutation, outcome in outcomes.items():
        if outcome.verdict != DIED:
            what = outcome.by or f"none of {', '.join(mutation.tests)} notices"
            lines.append(f"{outcome.verdict}: {mutation.breaks}\n  {mutation.file}: {mutation.text!r}\n  {what}")
    return "\n".join(lines)


def check(mutations: Sequence[Mutation]) -> int:
    """Say which cannot be made any more, or name tests that are not there; the exit code."""
    wrong = []
    for mutation in mutations:
        try:
            mutation.applied((ROOT / mutation.file).read_text(encoding="utf-8"))
            wrong += [f"no {path}" for path in mutation.paths() if not named(path)]
        except (NotApplicable, OSError) as error:
            wrong.append(str(error))
    print("\n".join([*wrong, f"{len(mutations)} mistakes, {len(wrong)} of them cannot be made or noticed"]))
    return 2 if wrong else 0


def named(path: str) -> bool:
    """Whether the test is there; a file whose tests start processes of their own is not taken whole."""
    file, _, name = path.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    return bool(re.search(rf"^(async )?def {name}\(", text, re.M)) if name else "warm_run" not in text


def main() -> int:
    """Run; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-k", default="", metavar="WORD", help="only mistakes with this word in file, text or meaning")
    parser.add_argument("--jobs", type=int, default=2, help="so many at a time (2)")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument(
        "--check", action="store_true", help="make each of them, and run no test: part of make lint (seconds)"
    )
    options = parser.parse_args()
    mutations = chosen(options.k)
    if options.list or not mutations:
        print("\n".join(f"{m.file}: {m.breaks}" for m in mutations) or f"no mistake has {options.k!r} in it")
        return 0 if mutations else 2
    if options.check:
        return check(mutations)
    began = time.perf_counter()
    server = ForkServer(WARM, {**os.environ, **ONE_THREAD, "VLLM_CONFIGURE_LOGGING": "0"})
    try:
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            copies = [Copy(Path(folder) / str(i), server.python) for i in range(max(1, options.jobs))]
            outcomes = tried(copies, mutations, failing(copies, mutations))
    finally:
        server.close()
    print(table(outcomes, time.perf_counter() - began))
    verdicts = {outcome.verdict for outcome in outcomes.values()}
    return 2 if {BROKEN, SLOW} & verdicts else int(SURVIVED in verdicts)


if __name__ == "__main__":
    sys.exit(main())
